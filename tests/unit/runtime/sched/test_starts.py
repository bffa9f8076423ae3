"""How many requests one step starts."""

from __future__ import annotations

import pytest

from sylvan.runtime.core.req import Batch
from sylvan.runtime.sched.admission import LIGHT_STEP, MIN_STARTS, max_starts
from tests.support.kv import World, alone, request

CROWD = 100


def crowd():
    return [request(f"c{i}", range(50 * i, 50 * i + 4), new=30) for i in range(CROWD)]


def roomy(**limits) -> World:
    limits |= {"max_batch_tokens": 400, "chunk_tokens": 400, "max_running_reqs": 200}
    return World(pages=4000, **limits)


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_crowd_holds_up_those_that_decode_by_a_few_starts_at_a_time(inflight):
    world = roomy(inflight=inflight)
    steps: list[Batch] = []
    world.watcher.watch = steps.append
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
        rids = [piece.req.rid for piece in batch.slices]
        new = set(rids) - begun
        begun |= new
        assert len(new) <= max_starts(len(rids) - len(new)) or not rids[len(new) :]
        starts.append(len(new))
    assert sum(starts) == CROWD + 1
    first_of_them = starts.index(max_starts(1))
    assert 0 not in starts[first_of_them : first_of_them + 3]
    for one in (first, *crowd()):
        assert world.tokens[one.rid] == alone(one)


def test_without_decoding_requests_all_that_fit_start_at_once():
    world = roomy()
    steps: list[Batch] = []
    world.watcher.watch = steps.append
    for one in crowd():
        world.scheduler.add(one)
    world.run()
    assert len(steps[0].slices) == CROWD


def test_the_more_continue_the_fewer_start_but_always_some():
    counts = [max_starts(others) for others in range(1, 2000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == (LIGHT_STEP - 1) // 12
    assert max_starts(256) == counts[-1] == MIN_STARTS
