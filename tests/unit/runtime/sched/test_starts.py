"""How many requests one step starts."""

from __future__ import annotations

import itertools

import pytest

from sylvan.runtime.core.req import Batch
from sylvan.runtime.sched.planner import MAX_STARTS_BESIDE
from tests.support.kv import World, alone, request

CROWD = 3 * MAX_STARTS_BESIDE + 1


def crowd():
    return [request(f"c{i}", range(50 * i, 50 * i + 4), new=30) for i in range(CROWD)]


def roomy(**limits) -> World:
    limits |= {"max_batch_tokens": 400, "chunk_tokens": 400, "max_running_reqs": 200}
    return World(pages=4000, **limits)


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_crowd_holds_up_those_that_decode_by_a_few_starts_at_a_time(inflight):
    world = roomy(inflight=inflight)
    steps: list[Batch] = []
    world.executor.watch = steps.append
    first = request("first", range(7), new=40)
    world.scheduler.add(first)
    for _ in range(4):
        world.scheduler.step()
    for one in crowd():
        world.scheduler.add(one)
    world.run()

    begun: set[str] = set()
    starts = []
    for batch in steps:
        new = {piece.req.rid for piece in batch.slices} - begun
        begun |= new
        starts.append(len(new))
    assert max(starts) == MAX_STARTS_BESIDE
    assert sum(starts) == CROWD + 1
    full = [i for i, count in enumerate(starts) if count == MAX_STARTS_BESIDE]
    assert all(after == before + 1 for before, after in itertools.pairwise(full))
    for one in (first, *crowd()):
        assert world.tokens[one.rid] == alone(one)


def test_where_nobody_decodes_all_that_fit_start_at_once():
    world = roomy()
    steps: list[Batch] = []
    world.executor.watch = steps.append
    for one in crowd():
        world.scheduler.add(one)
    world.run()
    assert len(steps[0].slices) == CROWD
