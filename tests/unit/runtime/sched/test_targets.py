"""The policy `slo`: running requests keep their `tpot_ms` beside prompts; none starves."""

from __future__ import annotations

import sys
from itertools import count

import pytest

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import PacingPolicy, PolicyContext
from sylvan.runtime.sched.policies.slo import INITIAL_RATE, LeastSlack
from sylvan.utils.clock import VirtualClock
from tests.support.kv import World, alone, request

DECODE_S, TOKEN_S = 0.005, 0.002


class Timed:
    """Result of a step, once the device has finished it."""

    def __init__(self, pending, clock: VirtualClock, done_s: float) -> None:
        self._pending, self._clock, self._done_s = pending, clock, done_s

    def done(self) -> bool:
        return self._clock() >= self._done_s

    def wait(self):
        self._clock.advance(max(0.0, self._done_s - self._clock()))
        return self._pending.wait()


def timed_world(policy: str = "slo", **limits) -> World:
    """One whose steps take the time that their tokens need, one after the other."""
    limits = {"max_batch_tokens": 256, "chunk_tokens": 128, "max_running_reqs": 64} | limits
    world = World(pages=9000, page_size=1, policy=policy, **limits)
    launch, busy_until = world.executor.launch, 0.0

    def launch_timed(plan) -> Timed:
        nonlocal busy_until
        sizes = (plan.stops - plan.starts).tolist()
        prompts = sum(size for size in sizes if size > 1)
        busy_until = max(busy_until, world.clock()) + DECODE_S + TOKEN_S * prompts
        return Timed(launch(plan), world.clock, busy_until)

    world.executor.launch = launch_timed
    return world


def drive(world: World, until=lambda: False, steps: int = 20_000) -> None:
    for _ in range(steps):
        if until() or (not world.scheduler.step() and world.scheduler.idle):
            return
        world.check()
    raise AssertionError(f"not done after {steps} steps")


def with_steady(world: World, tpot_ms: float, new: int = 100, **fields):
    """A request with a target, some tokens of which are out."""
    steady = request("steady", [1, 2, 3], new=new, tpot_ms=tpot_ms, **fields)
    world.scheduler.add(steady)
    drive(world, lambda: len(world.tokens.get("steady", ())) >= 5)
    return steady


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize(("policy", "met"), [("slo", 1), ("fcfs", 0)])
def test_prompts_leave_running_requests_their_time_between_tokens(policy, met, inflight):
    world = timed_world(policy, inflight=inflight)
    reqs = [with_steady(world, tpot_ms=20)]
    for number in range(60):  # 5 s of prompts beside 2 s of tokens
        reqs.append(request(f"p{number}", [number + 5, *range(40)], new=2))
        world.scheduler.add(reqs[-1])
    drive(world)

    load = world.scheduler.load()
    assert (load.targets_set, load.targets_met) == (1, met)
    for req in reqs:
        assert world.tokens[req.rid] == alone(req)
    world.check_empty()


def test_all_the_time_that_targets_leave_is_spent_on_prompts():
    world = timed_world()
    with_steady(world, tpot_ms=20)
    start, computed = world.clock(), world.scheduler.load().computed_tokens
    for number in range(60):
        world.scheduler.add(request(f"p{number}", [number + 5, *range(40)], new=1))
    drive(world, lambda: "steady" in world.finish)

    steps = (world.clock() - start) / 0.020
    prompts = world.scheduler.load().computed_tokens - computed - 95
    assert prompts > 0.8 * steps * (0.020 - DECODE_S) / TOKEN_S


@pytest.mark.parametrize("prompt", [40, 400])
def test_target_that_leaves_no_time_starves_no_other(prompt):
    """Nothing starts beside it before the age limit; then at least 64 tokens a step do."""
    world = timed_world(age_limit_s=1.0)
    with_steady(world, tpot_ms=1e3 * DECODE_S, new=2000)
    added = world.clock()
    world.scheduler.add(request("victim", range(50, 50 + prompt), new=1))
    drive(world, lambda: any(r.rid == "victim" for r in world.scheduler.running))
    assert world.clock() - added > 1.0

    began, steps = world.clock(), count()
    drive(world, lambda: "victim" in world.finish or next(steps) > prompt // 64 + 2)
    assert "victim" in world.finish
    assert began - added < 1.0 + 0.3


def test_more_urgent_prompt_does_not_wait_for_the_target_of_others():
    world = timed_world(age_limit_s=1e9)
    with_steady(world, tpot_ms=1e3 * DECODE_S, new=2000)
    world.scheduler.add(request("equal", range(50, 80), new=1))
    drive(world, lambda: len(world.tokens["steady"]) > 50)
    assert [r.rid for r in world.scheduler.waiting] == ["equal"]
    world.scheduler.add(request("urgent", range(150, 180), new=1, priority=1))
    drive(world, lambda: "urgent" in world.finish, steps=10)


def test_request_whose_memory_was_taken_continues_beside_targets():
    world = timed_world(age_limit_s=1e9)
    steady = with_steady(world, tpot_ms=1e3 * DECODE_S, new=300)
    other = request("other", range(50, 80), new=40, priority=1)
    world.scheduler.add(other)
    drive(world, lambda: len(world.tokens.get("other", ())) > 3)
    world.scheduler.pause("retract")
    world.scheduler.resume()
    drive(world, lambda: "other" in world.finish)

    assert len(world.tokens["steady"]) < 300
    drive(world)
    for req in (steady, other):
        assert world.tokens[req.rid] == alone(req)


# ---- what the policy answers


def running(rid: str = "r", outputs: int = 3, **fields) -> Req:
    fields = {"tpot_ms": 100.0, "new": 50} | fields
    req = Req(request(rid, [1, 2], **fields))
    for token in range(outputs):
        req.tokens.append(token)
    req.first_token_s = 10.0
    return req


def room(*reqs: Req, now: float = 10.1, priority: int = 0) -> int:
    clock = VirtualClock(now)
    policy = LeastSlack(PolicyContext(cached_tokens=lambda r: 0, clock=clock))
    assert isinstance(policy, PacingPolicy)
    return policy.prompt_tokens(reqs, priority)


def test_tokens_that_came_early_leave_time_for_prompts():
    assert room(running()) == pytest.approx(0.2 * INITIAL_RATE, abs=1)  # due 0.3 s after the first
    assert room(running(), running(outputs=2)) == pytest.approx(0.1 * INITIAL_RATE, abs=1)
    assert room(running(), now=10.5) == 0


@pytest.mark.parametrize(
    "free",
    [
        running(tpot_ms=None),
        running(new=3),  # all tokens are out
        running(new=5, tpot_ms=10.0),  # due 0.04 s after the first, but that was 0.1 s ago
    ],
)
def test_who_has_no_target_or_missed_it_delays_no_other(free):
    assert room(free) == sys.maxsize


def test_less_urgent_request_delays_no_other():
    assert room(running(), priority=1) == sys.maxsize
    assert room(running(priority=1), priority=1) < sys.maxsize


def test_outputs_of_an_earlier_life_earn_no_credit():
    assert room(running(output_ids=[7] * 20)) == room(running())
