"""The promise of each policy."""

from __future__ import annotations

import random

import pytest

from sylvan.protocol.errors import CapacityError, ConfigError, RequestError
from sylvan.protocol.messages import Finish
from sylvan.runtime.core.req import Req
from sylvan.runtime.sched import policies
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.policies.api import PolicyContext
from sylvan.runtime.sched.policies.vtc import OUTPUT_WEIGHT
from sylvan.utils import plugins
from sylvan.utils.clock import VirtualClock
from tests.support.kv import World, alone, request

ALL = plugins.options(policies)


def waiting(*lengths: int, **fields) -> list[Req]:
    return [
        Req(request(str(i), range(i * 1000, i * 1000 + n), **fields), order=i)
        for i, n in enumerate(lengths)
    ]


def order(name: str, reqs, cached=None, clock=None) -> list[str]:
    context = PolicyContext(
        cached_tokens=lambda r: (cached or {}).get(r.rid, 0),
        likely_hits=lambda reqs: (r for r in reqs if r.rid in (cached or {})),
        clock=clock or VirtualClock(),
    )
    return [r.rid for r in schedule_policy(name)(context).order(reqs)]


@pytest.mark.parametrize("name", ALL)
def test_policy_returns_each_request_once(name):
    reqs = waiting(3, 1, 4, 1, 5)
    assert sorted(order(name, reqs)) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fcfs", ["0", "1", "2"]),
        ("lpm", ["1", "2", "0"]),
        ("shortest_prefill", ["1", "0", "2"]),
        ("shortest-prefill", ["1", "0", "2"]),
    ],
)
def test_policy_orders_by_its_rule(name, expected):
    assert order(name, waiting(10, 12, 30), cached={"1": 9, "2": 8}) == expected


def test_unknown_policy_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'lpm'"):
        order("lpn", [])


def test_dfs_weight_keeps_branches_together_heaviest_first():
    reqs = [
        Req(request(str(i), [tens] * 20 + [i]), order=i)
        for i, tens in enumerate([1, 2, 1, 2, 2, 3])
    ]
    assert order("dfs_weight", reqs) == ["1", "3", "4", "0", "2", "5"]
    assert order("dfs_weight", reqs, cached={"0": 9, "2": 9})[:2] == ["0", "2"]


def test_hrrn_lets_a_long_prompt_rise_while_it_waits():
    clock = VirtualClock(100.0)
    old, new = waiting(4000, 100)
    old.arrived_s, new.arrived_s = 100.0, 100.0
    clock.advance(1.0)
    assert order("hrrn", [old, new], clock=clock) == ["1", "0"]

    new.arrived_s = clock()
    clock.advance(0.01)
    assert order("hrrn", [old, new], clock=clock) == ["0", "1"]


def test_slo_serves_least_slack_first_and_the_lost_ones_last():
    clock = VirtualClock(10.0)
    reqs = [
        Req(request(rid, range(10), ttft_ms=ms), arrived_s=10.0, order=i)
        for i, (rid, ms) in enumerate(
            [("loose", 5000), ("tight", 200), ("lost", 1), ("none", None)]
        )
    ]
    assert order("slo", reqs, clock=clock) == ["tight", "loose", "none", "lost"]


def test_goodput_counts_requests_that_met_their_targets():
    world = World(policy="slo")
    world.scheduler.add(request("in", [1, 2], new=3, ttft_ms=1000.0, tpot_ms=1000.0))
    world.scheduler.add(request("late", [3, 4], new=3, ttft_ms=0.001))
    world.scheduler.add(request("any", [5, 6], new=3))
    world.run()

    load = world.scheduler.load()
    assert (load.targets_set, load.targets_met) == (2, 1)


@pytest.mark.parametrize("name", ALL)
def test_no_policy_starves_anyone(name):
    """A long, uncached, unimportant request runs although better ones keep coming."""
    world = World(pages=400, page_size=1, policy=name, age_limit_s=1.0, max_running_reqs=2)
    victim = request("victim", range(100, 140), new=2, tenant="b")
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    world.scheduler.add(request("warm", shared, new=1, tenant="a"))
    world.run()
    started = None
    world.scheduler.add(victim)
    for number in range(3000):
        world.scheduler.add(request(f"a{number}", [*shared, number % 40], new=2, tenant="a"))
        world.scheduler.step()
        world.clock.advance(0.01)
        if "victim" in world.tokens:
            started = number * 0.01
            break

    assert started is not None
    assert started <= 1.0 + 0.2  # the age limit, and the few steps the prompt takes


def test_light_tenant_is_not_held_up_by_a_heavy_one():
    rng = random.Random(0)
    world = World(pages=3000, page_size=1, policy="vtc", max_running_reqs=4, age_limit_s=1e9)
    largest = 20 + 2 * 10
    for number in range(200):
        ids = [rng.randrange(40) for _ in range(20)]
        world.scheduler.add(request(f"h{number}", ids, new=10, tenant="heavy"))
    for number in range(40):
        ids = [rng.randrange(40) for _ in range(10)]
        world.scheduler.add(request(f"l{number}", ids, new=10, tenant="light"))
    policy = world.scheduler.policy
    gaps = []
    while any(r.request.tenant == "light" for r in world.scheduler.waiting):
        world.scheduler.step()
        gaps.append(abs(policy.served("heavy") - policy.served("light")))

    assert max(gaps) <= 2 * largest
    done = sum(rid.startswith("h") for rid in world.finish)
    assert done < 60  # a heavy request costs one and a third of a light one


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("running", [1, 2, 4, 16, 64])
def test_tenants_with_requests_of_all_sizes_get_the_same_service(seed, running):
    rng = random.Random(seed)
    world = World(
        pages=9000,
        page_size=1,
        policy="vtc",
        max_running_reqs=running,
        max_batch_tokens=64,
        age_limit_s=1e9,
    )
    largest = 0
    for tenant, count, prompt, output in (("large", 80, 60, 30), ("small", 400, 10, 5)):
        for number in range(count):
            length, new = rng.randrange(1, prompt), rng.randrange(1, output)
            ids = [rng.randrange(40) for _ in range(length)]
            world.scheduler.add(request(f"{tenant}{number}", ids, new=new, tenant=tenant))
            largest = max(largest, length + OUTPUT_WEIGHT * new)
    policy = world.scheduler.policy
    gap = held = 0
    while len({r.request.tenant for r in world.scheduler.waiting}) == 2:
        world.scheduler.step()
        gap = max(gap, abs(policy.served("large") - policy.served("small")))
        held = max(held, sum(r.num_tokens for r in world.scheduler.running))

    assert min(policy.served("large"), policy.served("small")) > 8 * largest
    assert gap <= 2 * (largest if running <= 16 else max(largest, OUTPUT_WEIGHT * held))


def test_tokens_from_the_cache_are_not_charged():
    world = World(pages=400, page_size=1, policy="vtc", max_batch_tokens=64, chunk_tokens=64)
    policy, ids, charged = world.scheduler.policy, list(range(40)), []
    for rid in ("first", "again"):
        before = policy.served("a")
        world.scheduler.add(request(rid, ids, new=3, tenant="a"))
        world.run()
        charged.append(policy.served("a") - before)

    assert charged == [40 + 3 * OUTPUT_WEIGHT, 1 + 3 * OUTPUT_WEIGHT]


def test_tenant_whose_prompts_are_cached_gets_more_of_them_in():
    reqs = [
        Req(request(f"{tenant}{i}", range(12), tenant=tenant), order=i)
        for i, tenant in enumerate("abababababababab")
    ]
    cached = {r.rid: 9 for r in reqs if r.request.tenant == "a"}
    first = [rid[0] for rid in order("vtc", reqs, cached)][:8]
    assert first.count("a") == 6  # at a quarter of the price


def test_weights_divide_service():
    context = PolicyContext(cached_tokens=lambda r: 0, tenant_weights={"a": 3.0, "b": 1.0})
    policy = schedule_policy("vtc")(context)
    reqs = [
        Req(request(f"{tenant}{i}", range(12), tenant=tenant), order=i)
        for i, tenant in enumerate("abababababababab")
    ]
    first = [r.request.tenant for r in policy.order(reqs)][:8]
    assert first.count("a") == 6


def test_urgent_request_takes_the_place_of_a_less_urgent_one():
    world = World(pages=40, page_size=1, max_running_reqs=2, preemption_threshold=10)
    for rid in ("x", "y"):
        world.scheduler.add(request(rid, [1, ord(rid)], new=14, priority=0))
    for _ in range(4):
        world.scheduler.step()
    world.scheduler.add(request("urgent", [5, 6], new=2, priority=10))
    world.scheduler.step()
    assert "urgent" in {r.rid for r in world.scheduler.running}
    world.run()

    assert world.tokens["x"] == alone(request("x", [1, ord("x")], new=14))
    assert world.tokens["y"] == alone(request("y", [1, ord("y")], new=14))
    assert world.scheduler.load().retractions == 1
    world.check_empty()


@pytest.mark.parametrize("priority", [0, 9])
def test_priority_below_the_threshold_waits(priority):
    world = World(pages=40, page_size=1, max_running_reqs=1, preemption_threshold=10)
    world.scheduler.add(request("x", [1, 2], new=14))
    world.scheduler.step()
    world.scheduler.add(request("y", [5, 6], new=2, priority=priority))
    world.scheduler.step()
    assert [r.rid for r in world.scheduler.running] == ["x"]


def test_request_that_can_never_fit_is_refused_with_what_would():
    world = World(pages=10, page_size=4)
    with pytest.raises(RequestError, match="40 would fit") as error:
        world.scheduler.add(request("a", range(30), new=11))
    assert error.value.param == "max_new_tokens"
    world.scheduler.add(request("b", range(30), new=10))
    world.run()
    assert len(world.tokens["b"]) == 10


def test_full_queue_refuses_for_now():
    world = World(max_waiting_reqs=2)
    for rid in "ab":
        world.scheduler.add(request(rid, [1]))
    with pytest.raises(CapacityError) as error:
        world.scheduler.add(request("c", [1]))
    assert error.value.status == 503
    assert error.value.retry_after_s > 0


def test_full_queue_ends_the_least_urgent_for_a_more_urgent_one():
    world = World(max_running_reqs=1, max_waiting_reqs=3)
    world.scheduler.add(request("running", [1], new=20))
    world.scheduler.step()
    for rid, priority in (("a", 2), ("b", 1), ("c", 1)):
        world.scheduler.add(request(rid, [1], priority=priority))
    world.scheduler.add(request("d", [1], priority=3))
    world.scheduler.step()

    assert world.finish.keys() == {"c"}
    assert (world.finish["c"].type, world.finish["c"].status) == ("abort", 503)
    assert "more urgent" in world.finish["c"].message
    with pytest.raises(CapacityError):
        world.scheduler.add(request("e", [1], priority=1))
    with pytest.raises(RequestError, match="fit"):  # no preemption for an impossible request
        world.scheduler.add(request("f", [1] * 10_000, priority=9))
    world.run()
    assert {rid for rid, finish in world.finish.items() if finish.type == "length"} == {
        *("running", "a", "b", "d")
    }


def test_duplicate_rid_is_refused():
    world = World()
    world.scheduler.add(request("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        world.scheduler.add(request("a", [1]))


def test_request_that_waits_too_long_is_ended():
    world = World(max_running_reqs=1, queue_timeout_s=1.0)
    world.scheduler.add(request("a", [1], new=10))
    world.scheduler.add(request("b", [2], new=10))
    world.scheduler.step()
    world.clock.advance(2.0)
    world.run()

    assert world.finish["b"].status == 503
    assert world.finish["a"].type == "length"


def test_deadline_ends_a_running_request():
    world = World()
    world.scheduler.add(request("a", [1], new=100, deadline_s=1.0))
    for _ in range(5):
        world.scheduler.step()
    world.clock.advance(1.5)
    world.run()

    assert world.finish["a"].type == "abort"
    assert world.finish["a"].status == 503
    assert len(world.tokens["a"]) > 0
    world.check_empty()


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_and_resume(mode):
    world = World(inflight=2)
    for rid in "abc":
        world.scheduler.add(request(rid, [1, 2, 3], new=8))
    for _ in range(3):
        world.scheduler.step()
    world.scheduler.pause(mode)
    assert not world.scheduler.step()
    if mode == "retract":
        assert world.scheduler.load().num_used_tokens == 0
    world.scheduler.resume()
    world.run()

    for rid in "abc":
        want = alone(request(rid, [1, 2, 3], new=8))
        if mode == "abort":
            assert world.finish[rid] == Finish(
                type="abort", message="generation was paused", status=503
            )
        else:
            assert world.tokens[rid] == want
    world.check_empty()


def test_flush_forgets_only_when_idle():
    world = World(page_size=1)
    world.scheduler.add(request("a", [1, 2, 3], new=2))
    world.scheduler.step()
    assert not world.scheduler.flush_cache()
    world.run()
    assert world.scheduler.load().num_cached_tokens > 0
    assert world.scheduler.flush_cache()
    assert world.scheduler.load().num_cached_tokens == 0


def test_lost_pages_are_found_and_taken_back():
    world = World(pages=50)
    world.scheduler.add(request("a", [1, 2, 3], new=20))
    for _ in range(4):
        world.scheduler.step()
    assert world.scheduler.audit() == 0

    world.allocator.alloc(7)  # a bug
    assert world.scheduler.audit() == 7
    assert world.scheduler.audit() == 0
    assert world.scheduler.load().repaired_pages == 7
    world.run()
    world.check_empty()
