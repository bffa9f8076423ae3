"""Exact counts of what prefix reuse saves, by policy; nothing is timed."""

from __future__ import annotations

import random

import pytest

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.capability import Capability, Verdict
from tests.support.kv import World, alone, request

SHARED, OWN, GROUPS, PER_GROUP = 96, 8, 24, 16
SHOTS = 128


def shuffled() -> list[tuple[str, list[int]]]:
    rng = random.Random(0)
    heads = [[rng.randrange(50) for _ in range(SHARED)] for _ in range(GROUPS)]
    work = [
        (f"{g}.{i}", [*heads[g], *(rng.randrange(50) for _ in range(OWN))])
        for g in range(GROUPS)
        for i in range(PER_GROUP)
    ]
    rng.shuffle(work)
    return work


@pytest.mark.parametrize("policy", ["lpm", "dfs_weight"])
def test_shuffled_groups_reach_the_offline_optimum_in_a_small_cache(policy):
    room = 3 * SHARED + 8 * (OWN + 16)  # three of twenty-four shared prefixes
    world = World(
        pages=room // 8,
        page_size=8,
        policy=policy,
        max_batch_tokens=256,
        chunk_tokens=256,
        max_running_reqs=8,
        age_limit_s=1e9,
    )
    work = shuffled()
    for rid, ids in work:
        world.scheduler.add(request(rid, ids, new=2))
    world.run(20_000)

    cached = sum(out[0].usage.cached_tokens for out in world.outputs.values())
    assert cached >= 0.96 * GROUPS * (PER_GROUP - 1) * SHARED


@pytest.mark.parametrize("questions", [64, 256])
@pytest.mark.parametrize("outputs", [1, 8])
def test_few_shot_workload_computes_exactly_what_theory_says(questions, outputs):
    rng = random.Random(questions)
    shots = [rng.randrange(50) for _ in range(SHOTS)]
    lengths = [rng.randrange(16, 65) for _ in range(questions)]
    totals = {}
    for prefix in (True, False):
        world = World(
            pages=20_000,
            page_size=1,
            prefix=prefix,
            max_batch_tokens=1024,
            chunk_tokens=1024,
            max_running_reqs=256,
        )
        for number, length in enumerate(lengths):
            # questions differ in their first token, so that they share the shots only
            own = [number + 50, *(rng.randrange(50) for _ in range(length - 1))]
            world.scheduler.add(request(str(number), [*shots, *own], new=outputs))
        world.run(20_000)
        totals[prefix] = world.scheduler.load().computed_tokens

    later = questions * (outputs - 1)  # the last output needs no KV
    assert totals[True] == SHOTS + sum(lengths) + later
    assert totals[False] == questions * SHOTS + sum(lengths) + later


class HeldUp(Capability):
    """The request `leader` does not get on after its first step."""

    gates_running = True
    held = True

    def gate(self, req: Req) -> Verdict:
        stuck = self.held and req.rid == "leader" and req.computed
        return Verdict.WAIT if stuck else Verdict.READY


@pytest.mark.parametrize("age_limit_s", [0.5, 2.0])
def test_request_waits_for_a_common_start_no_longer_than_the_age_limit(age_limit_s):
    hold = HeldUp()
    world = World(page_size=1, capabilities=(hold,), age_limit_s=age_limit_s)
    common = [*range(16), *range(40, 0, -1)]
    reqs = [request("leader", [*common, 3], new=3), request("follower", [*common, 4], new=3)]
    world.scheduler.add(reqs[0])
    world.scheduler.step()
    world.scheduler.add(reqs[1])
    added = world.clock()
    while "follower" not in [r.rid for r in world.scheduler.running]:
        assert world.clock() - added <= age_limit_s + 0.02
        world.scheduler.step()
        world.clock.advance(0.01)

    assert world.clock() - added > age_limit_s
    for _ in range(20):
        world.scheduler.step()
    assert "follower" in world.finish
    hold.held = False
    world.run()
    for req in reqs:
        assert world.tokens[req.rid] == alone(req)
    world.check_empty()
