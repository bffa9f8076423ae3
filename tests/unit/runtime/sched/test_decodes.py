from __future__ import annotations

import itertools

import pytest

from sylvan.runtime.core.req import Batch
from tests.support.kv import World, alone, request


def requests(count: int, new: int = 20):
    return [request(str(i), range(100 * i, 100 * i + 5), new=new) for i in range(count)]


def watched(world: World) -> list[tuple[Batch, list[tuple[int, int]]]]:
    """Batches as they are launched, and what their slices said then."""
    seen: list[tuple[Batch, list[tuple[int, int]]]] = []
    world.watcher.watch = lambda batch: seen.append((
        batch,
        [(piece.start, piece.stop) for piece in batch.slices],
    ))  # fmt: skip
    return seen


def test_the_same_decodes_are_the_same_objects_moved_on():
    world = World(page_size=4)
    seen = watched(world)
    for one in requests(3):
        world.scheduler.add(one)
    world.run()

    again = [
        (before, after)
        for before, after in itertools.pairwise(seen)
        if after[0].slices and after[0].slices is before[0].slices
    ]
    assert len(again) == 18  # twenty tokens each: a prompt, a first decode, the same eighteen times
    for (_, old), (after, new) in again:
        assert new == [(start + 1, stop + 1) for start, stop in old]
        needy = [p.req for p, (start, _) in zip(after.slices, new, strict=True) if start % 4 == 0]
        assert list(after.growth.reqs) == needy
    for one in requests(3):
        assert world.tokens[one.rid] == alone(one)


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_step_in_flight_keeps_its_slices(inflight):
    world = World(inflight=inflight)
    seen = watched(world)
    for one in requests(2):
        world.scheduler.add(one)
    world.run()

    repeats = (a[0].slices is b[0].slices for a, b in itertools.pairwise(seen) if a[0].slices)
    assert any(repeats) == (inflight == 1)
    for one in requests(2):
        assert world.tokens[one.rid] == alone(one)


def test_memory_that_is_short_is_found_request_by_request():
    # less memory than three requests end up with
    world = World(pages=8, page_size=4, conservativeness=0.0)
    for one in requests(3, new=15):
        world.scheduler.add(one)
    world.run()

    assert world.scheduler.load().retractions > 0
    for one in requests(3, new=15):
        assert world.tokens[one.rid] == alone(one)
    assert world.scheduler.audit() == 0


def test_a_newcomer_does_not_end_the_use_of_slices():
    world = World()
    seen = watched(world)
    first, second = requests(2)
    world.scheduler.add(first)
    for _ in range(4):
        world.scheduler.step()
    kept = seen[-1][0].slices[0]
    world.scheduler.add(second)
    world.run()

    assert all(
        piece is kept
        for batch, _ in seen[4:]
        for piece in batch.slices
        if piece.req.rid == first.rid
    )
    for one in (first, second):
        assert world.tokens[one.rid] == alone(one)
