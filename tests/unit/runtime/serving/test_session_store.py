"""The store of sessions: prompts from trees of turns, bounds, timeouts, tenants."""

from __future__ import annotations

from typing import Any

import pytest

from sylvan.api.native import OpenSessionBody, SessionParams
from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.runtime.serving.sessions import NewTurn, SessionLimits, SessionStore, Turn
from sylvan.utils.clock import VirtualClock

BOS = 1


class World:
    def __init__(self, **limits: int) -> None:
        self.clock = VirtualClock()
        self.aborted: list[str] = []
        self.store = SessionStore(self.abort, BOS, self.clock, SessionLimits(**limits))

    def abort(self, rid: str, tenant: str) -> None:
        assert tenant == ""
        self.aborted.append(rid)

    def open(self, name: str | None = None, tenant: str = "", timeout: float | None = None) -> str:
        body = OpenSessionBody(capacity_of_str_len=10, session_id=name, timeout=timeout)
        return self.store.open(tenant, body)

    def begin(self, rid: str, ids: list[int], *, tenant: str = "", **params: Any) -> Turn:
        wanted = SessionParams.model_validate({"id": "s", **params.pop("go", {})})
        return self.store.begin(tenant, wanted, NewTurn(rid=rid, ids=ids, **params))

    def turn(self, rid: str, ids: list[int], output: list[int], **fields: Any) -> list[int]:
        turn = self.begin(rid, ids, **fields)
        self.store.extend(turn, output)
        self.store.end(turn)
        return turn.prompt.tolist()


@pytest.fixture
def world() -> World:
    made = World()
    made.open("s")
    made.turn("a", [BOS, 2, 3], [4, 5])
    return made


@pytest.mark.parametrize(
    ("go", "new", "prompt"),
    [
        ({"rid": "a"}, [6], [1, 2, 3, 4, 5, 6]),
        ({"rid": "a"}, [BOS, 6], [1, 2, 3, 4, 5, 6]),
        ({"rid": "a"}, [6, BOS], [1, 2, 3, 4, 5, 6, BOS]),
        ({"rid": "a"}, [], [1, 2, 3, 4, 5]),
        ({"rid": "a", "offset": 0}, [6], [1, 2, 3, 4, 5, 6]),
        ({"rid": "a", "offset": 2}, [BOS, 6], [1, 2, 6]),
        ({"rid": "a", "offset": -1}, [6], [1, 2, 3, 4, 6]),
        ({"rid": "a", "offset": 99}, [6], [1, 2, 3, 4, 5, 6]),
        ({"rid": "a", "offset": -99}, [BOS, 6], [BOS, 6]),
        ({"rid": "a", "drop_previous_output": True}, [6], [1, 2, 3, 6]),
        ({"rid": "a", "drop_previous_output": True, "offset": -1}, [6], [1, 2, 6]),
        ({}, [BOS, 6], [BOS, 6]),
    ],
)
def test_prompt_is_history_and_new_part(world, go, new, prompt):
    assert world.turn("b", new, [], go=go) == prompt


def test_output_is_cut_at_its_limit(world):
    world.turn("b", [9], [10, 11, 12], max_new_tokens=2)

    assert world.turn("c", [13], [], go={"rid": "b"}) == [9, 10, 11, 13]


def test_branches_share_their_root(world):
    world.turn("b", [6], [7], go={"rid": "a"})
    world.turn("c", [8], [9], go={"rid": "a"})

    assert world.turn("d", [0], [], go={"rid": "b"}) == [1, 2, 3, 4, 5, 6, 7, 0]
    assert world.turn("e", [0], [], go={"rid": "c"}) == [1, 2, 3, 4, 5, 8, 9, 0]


def test_replace_forgets_what_came_after(world):
    world.turn("b", [6], [7], go={"rid": "a"})
    running = world.begin("c", [8], go={"rid": "b"})
    replaced = world.turn("b", [9], [], go={"rid": "a", "replace": True})

    assert replaced == [1, 2, 3, 4, 5, 9]
    assert world.aborted == ["c"]
    with pytest.raises(RequestError, match="no turn 'c'"):
        world.begin("d", [0], go={"rid": "c"})
    world.store.extend(running, [1])
    world.store.end(running)
    assert running.session.num_tokens == 5 + 6
    assert running.session.num_running == 0


def test_replace_continues_from_a_running_turn_that_it_ends(world):
    turn = world.begin("b", [6], go={"rid": "a"})
    world.store.extend(turn, [7])

    assert world.turn("c", [8], [], go={"rid": "b", "replace": True})[-3:] == [6, 7, 8]
    assert world.aborted == ["b"]


def test_replace_without_a_turn_forgets_everything(world):
    world.begin("b", [6], go={"rid": "a"})

    assert world.turn("a", [8], [9], go={"replace": True}) == [8]
    assert world.aborted == ["b"]
    assert world.turn("b", [0], [], go={"rid": "a"}) == [8, 9, 0]


@pytest.mark.parametrize(
    ("go", "words"),
    [
        ({"id": "x"}, "no session 'x'"),
        ({"rid": "x"}, "no turn 'x'"),
        ({"rid": "running"}, "has not finished"),
        ({}, "must not be empty"),
        ({"rid": "a", "offset": -99}, "must not be empty"),
    ],
)
def test_turn_that_cannot_be_made_is_refused(world, go, words):
    world.begin("running", [6])
    with pytest.raises(RequestError, match=words):
        world.begin("b", [], go=go)


def test_names_of_turns_differ(world):
    with pytest.raises(RequestError, match="'a' already"):
        world.begin("a", [6])


def test_turn_that_is_refused_leaves_no_trace(world):
    turn = world.begin("b", [6], go={"rid": "a"})
    with pytest.raises(CapacityError), world.store.recorded(turn):
        raise CapacityError("full")

    assert world.turn("b", [7], [], go={"rid": "a"}) == [1, 2, 3, 4, 5, 7]


def test_turn_whose_client_left_can_be_gone_on_from(world):
    turn = world.begin("b", [6])
    world.store.extend(turn, [7])
    with pytest.raises(GeneratorExit), world.store.recorded(turn):
        raise GeneratorExit

    assert world.turn("c", [8], [], go={"rid": "b"}) == [6, 7, 8]


def test_ids_are_taken_once_and_free_after_closing(world):
    with pytest.raises(RequestError, match="already"):
        world.open("s")
    world.begin("b", [6])

    assert world.store.close("", "s")
    assert world.aborted == ["b"]
    assert not world.store.close("", "s")
    assert world.open("s") == "s"
    assert world.open() != world.open()


def test_tenants_do_not_see_each_other(world):
    with pytest.raises(RequestError, match="no session"):
        world.begin("b", [6], tenant="other")
    assert not world.store.close("other", "s")
    assert world.open("s", tenant="other") == "s"
    assert world.turn("a", [9], [], tenant="other") == [9]
    assert world.turn("b", [6], [], go={"rid": "a"}) == [1, 2, 3, 4, 5, 6]


def test_session_that_rests_too_long_is_closed():
    world = World()
    world.open("s", timeout=10.0)
    world.clock.advance(9.0)
    turn = world.begin("a", [1])
    world.clock.advance(100.0)  # it runs, so it does not rest
    world.store.end(turn)
    world.clock.advance(9.9)
    world.turn("b", [2], [], go={"rid": "a"})
    world.clock.advance(10.0)

    with pytest.raises(RequestError, match="no session"):
        world.begin("c", [3])
    assert world.open("s") == "s"


def test_beyond_the_limit_the_session_that_rested_longest_is_closed():
    world = World(sessions=2)
    for name in ("s", "t"):
        world.open(name)
        world.clock.advance(1.0)
    running = world.begin("a", [1])
    world.open("u")
    assert not world.store.close("", "t")

    world.begin("b", [1], go={"id": "u"})
    with pytest.raises(CapacityError, match="2 sessions"):
        world.open("v")
    world.store.end(running)
    world.open("v")
    assert not world.store.close("", "s")


def test_tokens_are_bounded():
    world = World(tokens=10)
    for name in ("s", "t"):
        world.open(name)
        world.clock.advance(1.0)
    world.turn("a", [1] * 3, [2] * 3)
    turn = world.begin("b", [1] * 4, go={"id": "t"})
    with pytest.raises(RequestError, match="more than 10 tokens"):
        world.begin("c", [3], go={"rid": "a", "id": "s"})
    world.begin("c", [3], go={"id": "t"})  # at the cost of the other, which rests

    assert not world.store.close("", "s")
    assert turn.session.num_tokens == 5


def test_turns_are_bounded():
    world = World(turns=2)
    world.open("s")
    for rid in ("a", "b"):
        world.turn(rid, [1], [])
    with pytest.raises(RequestError, match="2 turns"):
        world.begin("c", [1])
    world.begin("c", [1], go={"replace": True})


def test_session_that_is_unused_is_closed_even_if_it_has_no_timeout():
    world = World(rest_s=100.0)
    name = world.store.open("red", OpenSessionBody(capacity_of_str_len=9))
    world.clock.advance(101)

    assert not world.store.close("red", name)
