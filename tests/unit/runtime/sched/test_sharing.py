"""Exact counts of what prefix reuse saves, by policy; nothing is timed."""

from __future__ import annotations

import random

import pytest

from tests.support.kv import World, request

SHARED, OWN, GROUPS, PER_GROUP = 96, 8, 24, 16


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
    shots = [rng.randrange(50) for _ in range(512)]
    lengths = [rng.randrange(16, 65) for _ in range(questions)]
    totals = {}
    for prefix in (True, False):
        world = World(
            pages=20_000,
            page_size=1,
            prefix=prefix,
            max_batch_tokens=4096,
            chunk_tokens=4096,
            max_running_reqs=256,
        )
        for number, length in enumerate(lengths):
            # questions differ in their first token, so that they share the shots only
            own = [number + 50, *(rng.randrange(50) for _ in range(length - 1))]
            world.scheduler.add(request(str(number), [*shots, *own], new=outputs))
        world.run(20_000)
        totals[prefix] = world.scheduler.load().computed_tokens

    later = questions * (outputs - 1)  # the last output needs no KV
    assert totals[True] == 512 + sum(lengths) + later
    assert totals[False] == questions * 512 + sum(lengths) + later
