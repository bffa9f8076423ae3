"""A simulation is a function of its input, loses nothing, and skipping steps changes nothing."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.config.route import RoutingConfig
from sylvan.gateway import policies
from sylvan.runtime.cache.groups import KVGroup
from sylvan.sim.fleet import Fleet
from sylvan.utils.plugins import options
from tests.support.simulated import profile, workload


def serve(
    work,
    replicas=2,
    policy="cache_aware",
    seed=0,
    scatter=True,
    skips=True,
    schedule="lpm",
    **kwargs,
):
    fleet = Fleet(
        profile(schedule=schedule, **kwargs), RoutingConfig(policy=policy), replicas,
        seed=seed, scatter=scatter, skips=skips,
    )  # fmt: skip
    fleet.run(work)
    return fleet


def state(fleet):
    counts = [(r.executor.steps, r.executor.rows, r.executor.busy_s) for r in fleet.replicas]
    loads = [
        msgspec.structs.replace(
            load, forward_seconds=round(load.forward_seconds, 12)
        )  # sums of other orders
        for load in (r.scheduler.load() for r in fleet.replicas)
    ]
    return asdict(fleet.outcomes), counts, loads


def assert_conserved(fleet, work):
    """All requests end, tokens add up, and nothing is left."""
    outcomes = fleet.outcomes
    wanted = sorted(turn.output_tokens for each in work.conversations for turn in each.turns)
    assert not outcomes.errors
    assert sorted(outcomes.output) == wanted
    assert len(outcomes) == work.num_requests
    for due_s, sent_s, first_s, end_s in zip(
        outcomes.due_s, outcomes.sent_s, outcomes.first_s, outcomes.end_s, strict=True
    ):
        assert due_s <= sent_s < first_s <= end_s
    assert all(0 <= c < p for c, p in zip(outcomes.cached, outcomes.prompt, strict=True))
    loads = [replica.scheduler.load() for replica in fleet.replicas]
    assert sum(load.num_running_reqs + load.num_waiting_reqs for load in loads) == 0
    assert sum(load.num_used_tokens for load in loads) == 0
    assert sum(load.computed_tokens for load in loads) == sum(
        replica.executor.rows for replica in fleet.replicas
    )
    if not sum(outcomes.retractions):
        # each token but the last of an answer is computed once, or came from the cache
        computed = sum(outcomes.prompt) + sum(outcomes.output) - len(outcomes)
        warm = sum(t.length + t.output_tokens - 1 for t in work.warmup)
        rows = sum(load.computed_tokens for load in loads)
        assert rows <= computed + warm - sum(outcomes.cached)
        if not work.warmup:
            assert rows == computed - sum(outcomes.cached)
    for replica in fleet.replicas:
        assert replica.scheduler.idle
        assert replica.scheduler.audit() == 0


@pytest.mark.parametrize("policy", options(policies))
def test_the_same_seed_gives_the_same_result_with_every_policy(policy):
    work = workload(turns=2)
    once, again = (serve(work, policy=policy, seed=3) for _ in range(2))

    assert state(once) == state(again)
    assert_conserved(once, work)


def test_another_seed_gives_other_times():
    work = workload()

    assert serve(work, seed=1).outcomes.end_s != serve(work, seed=2).outcomes.end_s
    assert serve(work, seed=1, scatter=False).outcomes.end_s == pytest.approx(
        serve(work, seed=2, scatter=False).outcomes.end_s
    )


def test_answers_reach_clients_as_much_later_as_measured():
    """The spread moves the tail of times to the first token; the scheduler sees nothing of it."""
    work, plain = workload(200), profile()
    request = msgspec.structs.replace(plain.request, spread=(-0.001, 0.0, 0.0, 0.1))
    spread = msgspec.structs.replace(plain, request=request)
    usual, late, still = (
        Fleet(made, RoutingConfig(policy="round_robin"), 2, seed=4, scatter=scatter).run(work)
        for made, scatter in ((plain, True), (spread, True), (spread, False))
    )

    more = late.ttft_s - usual.ttft_s
    assert -0.001 <= more.min() < 0.0 < more.max() <= 0.1
    assert np.median(more) == pytest.approx(0.0, abs=2e-3)
    assert np.percentile(more, 95) == pytest.approx(0.085, abs=0.02)
    assert late.latency_s - usual.latency_s == pytest.approx(more)
    assert usual.replica == late.replica
    unscattered = Fleet(plain, RoutingConfig(policy="round_robin"), 2, scatter=False).run(work)
    assert still.end_s == unscattered.end_s


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 50),
    rate=st.sampled_from([2.0, 30.0, 200.0, 1e6]),
    turns=st.integers(1, 3),
    replicas=st.integers(1, 4),
    concurrency=st.sampled_from([None, 1, 3]),
    policy=st.sampled_from(["cache_aware", "round_robin", "power_of_two"]),
    pages=st.sampled_from([24, 60, 513]),
    inflight=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["lpm", "fcfs", "vtc", "slo"]),
    scatter=st.booleans(),
    seed=st.integers(0, 99),
)
def test_skipping_steps_changes_nothing_and_everything_is_conserved(
    count, rate, turns, replicas, concurrency, policy, pages, inflight, schedule, scatter, seed
):
    work = workload(
        count, rate=rate, turns=turns, seed=seed, concurrency=concurrency, warmup=seed % 2
    )
    given = {
        "replicas": replicas, "policy": policy, "seed": seed, "scatter": scatter, "pages": pages,
    }  # fmt: skip
    made = {"inflight": inflight, "schedule": schedule}
    skipped = serve(work, **given, **made)
    stepped = serve(work, **given, **made, skips=False)

    assert state(skipped) == state(stepped)
    assert_conserved(skipped, work)


def test_a_request_alone_takes_the_time_of_its_steps():
    work = workload(1)
    [turn] = work.conversations[0].turns
    fleet = serve(work, replicas=1, scatter=False)
    made = profile()
    step, host, outside = made.step, made.host, made.request

    def step_s(rows, samples, context, pairs):
        linear = step.constant + (rows - 1) * step.rows[0]
        return linear + step.sample * samples + step.context * context + step.pair * pairs

    length, chunk = turn.length, 64
    first = min(length, chunk)
    # the call of the scheduler that plans a step is followed by the host's part
    now_s = outside.constant + host.constant + host.slice + host.start
    pairs = first * (first + 1) / 2
    now_s += step_s(first, first == length, 0, pairs)
    if length > first:
        rest = length - first
        pairs = rest * (first + length + 1) / 2
        now_s += host.constant + host.slice
        now_s += step_s(rest, 1, 0, pairs) if rest > 1 else step_s(1, 1, length, 0)
    assert fleet.outcomes.ttft_s[0] == pytest.approx(now_s, rel=1e-9)
    for place in range(1, turn.output_tokens):
        now_s += host.constant + host.slice + step_s(1, 1, length + place, 0)
    assert fleet.outcomes.latency_s[0] == pytest.approx(now_s, rel=1e-9)


def test_what_does_not_fit_fails_alone_with_the_reason():
    work = workload(30, rate=1000.0)
    fleet = serve(work, replicas=1, pages=12)

    failed, outcomes = fleet.outcomes.errors, fleet.outcomes
    assert 0 < len(failed) < 30
    assert all("tokens of KV memory" in error for error in failed.values())
    served = [n for place, n in enumerate(outcomes.output) if place not in failed]
    assert all(served)
    assert fleet.replicas[0].scheduler.idle


def test_routing_by_cached_prefix_hits_more_than_in_turn():
    work = workload(200, rate=20.0, groups=40)

    def hits(policy):
        return sum(serve(work, replicas=4, policy=policy).outcomes.cached)

    assert hits("cache_aware") > 1.1 * hits("round_robin")


def test_more_replicas_do_not_increase_waiting():
    work = workload(200, rate=400.0)
    waits = [np.median(serve(work, replicas=n, scatter=False).outcomes.ttft_s) for n in (1, 2, 4)]

    assert waits[0] > waits[1] > waits[2]


@pytest.mark.parametrize("kind", ["window", "state"])
@pytest.mark.parametrize("first", ["full", "window"])
def test_models_of_several_kinds_of_memory_are_simulated(kind, first):
    window = {"page_size": 8, "window": 16}
    groups = {
        "full": KVGroup(name="a", kind="full", num_pages=80, page_size=8),
        "window": KVGroup(name="a", kind="window", num_pages=80, **window),
    }
    more = {
        "window": KVGroup(name="b", kind="window", num_pages=60, **{**window, "window": 40}),
        "state": KVGroup(name="b", kind="state", num_pages=24),
    }
    made = profile()
    engine = msgspec.structs.replace(made.engine, kv_groups=(groups[first], more[kind]))
    made, work = msgspec.structs.replace(made, engine=engine), workload(40, turns=2)
    ran = []
    for skips in (True, False):
        fleet = Fleet(made, RoutingConfig(policy="round_robin"), 2, skips=skips)
        fleet.run(work)
        ran.append(state(fleet))
        assert not fleet.outcomes.errors
        assert all(r.scheduler.idle and r.scheduler.audit() == 0 for r in fleet.replicas)
    assert ran[0] == ran[1]
