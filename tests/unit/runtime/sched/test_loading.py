"""Requests whose memory is filled from elsewhere before they run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from sylvan.runtime.core.req import Phase, Req
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict
from sylvan.runtime.sched.phases import TRANSITIONS
from tests.support.kv import World, alone, histories, request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


class Arrivals(Capability):
    """Fills memory as another server would, when the test says so."""

    def __init__(self) -> None:
        self.world: World
        self.port: SchedulerPort
        self.loading: dict[str, Req] = {}
        self.held: set[str] = set()
        self.stoppable = True
        self.asked = 0

    def attach(self, port: SchedulerPort) -> None:
        self.port = port

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        wanted = req.rid.startswith("load") and req.may_load
        return Verdict.LOAD if wanted else Verdict.READY

    def on_load(self, req: Req) -> None:
        self.loading[req.rid] = req

    def stop_loading(self, req: Req) -> bool:
        self.asked += 1
        if self.stoppable:
            self.loading.pop(req.rid, None)
        return self.stoppable

    def holds(self, req: Req) -> bool:
        """Memory that is still being written stays allocated."""
        if req.rid in self.loading:
            self.held.add(req.rid)
        return req.rid in self.held

    def arrive(self, rid: str, count: int) -> None:
        """The KV of the first `count` tokens is here."""
        req = self.loading.pop(rid)
        assert req.kv is not None
        memory, size = self.world.executor.memory[0], self.world.cache.page_size
        for position, history in enumerate(histories(req.request)[1 : count + 1]):
            page = int(req.kv.view()[position // size])
            memory[page * size + position % size] = history
        self.port.loaded(rid, count)

    def fail(self, rid: str) -> None:
        del self.loading[rid]
        self.port.load_failed(rid)


def loading_world(**options) -> tuple[World, Arrivals]:
    arrivals = Arrivals()
    world = World(**({"pages": 60, "capabilities": (arrivals,)} | options))
    arrivals.world = world
    return world, arrivals


def phase(world: World, rid: str) -> Phase:
    return world.scheduler._requests.live(rid).phase


def run_steps(world: World, count: int) -> None:
    for _ in range(count):
        world.clock.advance(0.01)
        world.scheduler.step()
        world.check()


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("count", [0, 5, 16, 20])
def test_what_was_loaded_is_not_computed(inflight, count):
    world, arrivals = loading_world(inflight=inflight)
    asked = request("load", PROMPT, new=4)
    world.scheduler.add(asked)
    run_steps(world, 3)
    assert phase(world, "load") is Phase.LOADING
    assert not world.scheduler.idle
    arrivals.arrive("load", count)
    world.run()

    assert world.tokens["load"] == alone(asked)
    first = min(start for _, start, _ in world.executor.computed)
    assert first == min(count, len(PROMPT) - 1)
    world.check_empty()


def test_what_does_not_fit_at_once_is_computed():
    """Loading takes a page of each KV group for every token; a window may have fewer."""
    world, arrivals = loading_world(windows=[(8, 7)])
    asked = request("load", range(100), new=4)
    world.scheduler.add(asked)
    world.run()

    assert world.tokens["load"] == alone(asked)
    assert not arrivals.loading
    world.check_empty()


def test_others_run_meanwhile_and_a_loaded_prompt_is_shared():
    world, arrivals = loading_world()
    world.scheduler.add(request("load", PROMPT, new=4))
    other = request("other", [7, 7, 7], new=4)
    world.scheduler.add(other)
    run_steps(world, 10)
    assert world.tokens["other"] == alone(other)
    arrivals.arrive("load", 16)
    world.run()
    again = request("again", PROMPT, new=4)
    world.scheduler.add(again)
    world.run()

    assert world.tokens["again"] == alone(again)
    assert world.outputs["again"][-1].usage.cached_tokens >= 16


def test_a_failed_load_is_computed_instead_and_not_tried_again():
    world, arrivals = loading_world()
    asked = request("load", PROMPT, new=4)
    world.scheduler.add(asked)
    run_steps(world, 2)
    arrivals.fail("load")
    world.run()

    assert world.tokens["load"] == alone(asked)
    assert not arrivals.loading
    world.check_empty()


def test_a_load_has_a_deadline_and_memory_waits_until_nothing_writes_to_it():
    world, arrivals = loading_world(load_timeout_s=0.5)
    arrivals.stoppable = False
    asked = request("load", PROMPT, new=4)
    world.scheduler.add(asked)
    run_steps(world, 1)
    world.clock.advance(1.0)
    run_steps(world, 5)
    assert phase(world, "load") is Phase.LOADING  # asked in vain
    assert arrivals.asked == 5
    arrivals.stoppable = True
    world.run()

    assert world.tokens["load"] == alone(asked)
    world.check_empty()


def test_a_request_that_ends_while_it_loads_keeps_its_memory_until_released():
    world, arrivals = loading_world()
    world.scheduler.add(request("load", PROMPT, new=4))
    run_steps(world, 1)
    world.scheduler.abort("load")
    assert world.scheduler.load().num_used_tokens >= len(PROMPT)
    assert not world.scheduler.flush_cache()
    with pytest.raises(Exception, match="in use"):
        world.scheduler.add(request("load", PROMPT, new=4))
    arrivals.port.release("load")
    world.scheduler.step()

    world.check_empty()


def test_reports_about_others_are_ignored():
    world, arrivals = loading_world()
    world.scheduler.add(request("plain", PROMPT, new=4))
    run_steps(world, 1)
    for rid in ("plain", "nobody"):
        arrivals.port.loaded(rid, 3)
        arrivals.port.load_failed(rid)
        arrivals.port.release(rid)
    world.run()

    assert world.tokens["plain"] == alone(request("plain", PROMPT, new=4))
    world.check_empty()


class Traffic:
    """Requests that come, load, fail and are aborted at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world, self.arrivals = loading_world(
            pages=self.rng.choice([12, 30, 60]),
            page_size=self.rng.choice([1, 4]),
            inflight=self.rng.choice([1, 2]),
            load_timeout_s=0.3,
        )
        self.asked: dict[str, Any] = {}
        self.aborted: set[str] = set()

    def come(self, number: int) -> None:
        rng = self.rng
        rid = f"{rng.choice(['load', 'plain'])}{number}"
        ids = [*PROMPT[: rng.choice([0, 4, 8])], number % 50, rng.randrange(50)]
        if self.world.cache.total_tokens < len(ids) + 6:
            ids = ids[-2:]
        self.asked[rid] = request(rid, ids, new=rng.randrange(1, 6))
        self.world.scheduler.add(self.asked[rid])

    def report(self, rid: str) -> None:
        event = self.rng.random()
        if event < 0.4:
            self.arrivals.arrive(rid, self.rng.randrange(len(self.asked[rid].input_ids) + 1))
        elif event < 0.6:
            self.arrivals.fail(rid)
        elif event < 0.7:
            self.world.scheduler.abort(rid)
            self.aborted.add(rid)
            self.arrivals.loading.pop(rid, None)
            self.arrivals.port.release(rid)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_events_ends_every_request_right(seed):
    traffic = Traffic(seed)
    world = traffic.world
    for number in range(30):
        traffic.come(number)
        run_steps(world, traffic.rng.randrange(3))
        for rid in list(traffic.arrivals.loading):
            traffic.report(rid)
        if traffic.rng.random() < 0.1:
            world.scheduler.pause("retract")
            world.scheduler.resume()
    for _ in range(400):
        run_steps(world, 1)
        if world.scheduler.idle:
            break

    assert set(world.finish) == set(traffic.asked)
    for rid, one in traffic.asked.items():
        if rid not in traffic.aborted:
            assert world.tokens[rid] == alone(one)
    world.check_empty()


def test_each_phase_can_be_left_but_the_last():
    assert set(TRANSITIONS) == set(Phase)
    assert [phase for phase, to in TRANSITIONS.items() if not to] == [Phase.ENDED]
    assert all(Phase.ENDED in to for phase, to in TRANSITIONS.items() if phase is not Phase.ENDED)


@pytest.mark.parametrize("phase", [p for p in Phase if p not in TRANSITIONS[Phase.WAITING]])
def test_a_move_that_the_table_does_not_allow_is_a_defect(phase):
    world = World()
    world.scheduler.add(request("a", PROMPT))
    req = world.scheduler._requests.live("a")

    with pytest.raises(AssertionError, match="a: "):
        world.scheduler._requests.move(req, phase)
