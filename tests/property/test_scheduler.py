"""The whole scheduler over checked memory: whatever happens, results equal those alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from sylvan.protocol.messages import Finish
from sylvan.protocol.sampling import SamplingParams
from tests.support.kv import World, alone, request
from tests.support.scheduler_inputs import setups
from tests.support.scheduler_machine import SchedulerMachine


class AnyScheduler(SchedulerMachine):
    """Models whose layers all attend."""

    @initialize(setup=setups(states=st.just(0)))
    def begin(self, setup):
        self.start(setup)


TestAnyScheduler = AnyScheduler.TestCase
TestAnyScheduler.settings = settings(
    max_examples=50, stateful_step_count=40, report_multiple_bugs=False
)


@pytest.mark.slow
class TestAnySchedulerAtLength(AnyScheduler.TestCase):
    settings = settings(
        max_examples=200, stateful_step_count=40, deadline=None, report_multiple_bugs=False
    )


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_token_is_computed_once_when_memory_suffices(inflight, page_size):
    world = World(pages=2000, page_size=page_size, inflight=inflight, prefix=False)
    lengths = {str(i): 5 * i + 1 for i in range(10)}
    for rid, length in lengths.items():
        world.scheduler.add(request(rid, range(length), new=4))
    world.run()

    for rid, length in lengths.items():
        pieces = sorted((a, b) for r, a, b in world.executor.computed if r == rid)
        assert pieces[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        assert pieces[-1][1] - length == 3  # the last output needs no KV


@pytest.mark.parametrize("chunk", [8, 1000])
def test_shared_prompt_is_computed_once_even_when_all_arrive_together(chunk):
    world = World(
        pages=4000, page_size=4, chunk_tokens=chunk, max_batch_tokens=4000, max_running_reqs=64
    )
    shared = list(range(40)) * 5
    for i in range(32):
        world.scheduler.add(request(str(i), [*shared, 100 + i, 7, 7], new=2))
    world.run()

    computed = sum(b - a for _, a, b in world.executor.computed)
    assert computed == 200 + 32 * 3 + 32 * 1
    assert world.scheduler.load().computed_tokens == computed
    world.check_empty()


def test_next_turn_reuses_prompt_and_output_inside_a_page():
    world = World(pages=100, page_size=16)
    world.scheduler.add(request("a", range(10), new=5))
    world.run()
    turn = [*range(10), *world.tokens["a"], 30, 31]
    world.scheduler.add(request("b", turn, new=3))
    world.run()

    out = world.outputs["b"][-1]
    assert out.usage.cached_tokens == 14  # the last output of the first turn has no KV
    assert world.tokens["b"] == alone(request("b", turn, new=3))
    world.check_empty()


def test_retraction_happens_and_changes_nothing():
    world = World(pages=12, page_size=2, max_running_reqs=8, conservativeness=0.0)
    reqs = [request(str(i), [i, i + 1, i + 2], new=12) for i in range(6)]
    for req in reqs:
        world.scheduler.add(req)
    world.run()

    assert world.scheduler.load().retractions > 0
    assert any(o[-1].usage.retractions for o in world.outputs.values())
    for req in reqs:
        assert world.tokens[req.rid] == alone(req)
    world.check_empty()


@pytest.mark.parametrize("inflight", [1, 2])
def test_stop_found_in_the_text_keeps_later_tokens_out_of_the_cache(inflight):
    world = World(pages=100, page_size=1, inflight=inflight)
    stops = SamplingParams(max_new_tokens=20, sampling_seed=1, stop=("x",))
    world.scheduler.add(request("a", [1, 2, 3], sampling=stops))
    for _ in range(9):
        world.scheduler.step()
    world.scheduler.stop_at("a", 4, "x")
    world.run()

    out = alone(request("a", [1, 2, 3], sampling=stops))
    world.scheduler.add(request("b", [1, 2, 3, *out, 9], new=1))
    world.run()
    assert world.outputs["b"][0].usage.cached_tokens == 3 + 4
    world.check_empty()


def test_request_with_stops_keeps_its_memory_until_its_text_is_confirmed():
    world = World(pages=100, page_size=1)
    stops = SamplingParams(max_new_tokens=3, sampling_seed=1, stop=("x",))
    world.scheduler.add(request("a", [1, 2, 3], sampling=stops))
    world.run()
    assert world.finish["a"] == Finish(type="length", length=3)
    assert world.scheduler.load().num_used_tokens > 0

    world.scheduler.stop_at("a", 3, None)
    world.check_empty()


def test_replayed_request_continues_where_it_was():
    world = World(page_size=4)
    whole = alone(request("a", [5, 6, 7], new=10))
    world.scheduler.add(request("a", [5, 6, 7], new=10, output_ids=whole[:4]))
    world.run()

    assert world.tokens["a"] == whole[4:]
    assert world.outputs["a"][-1].usage.completion_tokens == 10
    assert world.outputs["a"][-1].usage.prompt_tokens == 3


def test_max_new_tokens_zero_fills_the_cache_and_gives_nothing():
    world = World(page_size=1)
    world.scheduler.add(request("a", [1, 2, 3, 4], new=0))
    world.run()
    assert world.tokens["a"] == []
    assert world.finish["a"].type == "length"

    world.scheduler.add(request("b", [1, 2, 3, 4, 5], new=1))
    world.run()
    assert world.outputs["b"][0].usage.cached_tokens == 4


def test_an_answer_that_recites_a_public_prompt_is_set_apart_from_its_own_end():
    """A prompt that is a start of the public one, made to continue it, and then its next turn."""
    world = World(pages=60, page_size=16)
    public = [(7 * i) % 40 for i in range(30)]
    tenant = {"cache_salt": "tenant/", "new": 24}
    recited = request("a", public[:18], output_ids=public[18:], shared_tokens=18, **tenant)
    world.scheduler.add(recited)
    world.run()
    turn = request("b", [*public, *world.tokens["a"], 1], shared_tokens=30, **tenant)
    world.scheduler.add(turn)
    world.run()

    assert world.finish["a"].type == world.finish["b"].type == "length"
    assert world.tokens["b"] == alone(turn)
    assert world.outputs["b"][-1].usage.cached_tokens == 18
    world.check_empty()
