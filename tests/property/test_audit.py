"""Leaks by bugs, injected at random: the audit finds them, and no client notices."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.runtime.cache.types import below
from tests.support.kv import World, alone, holders_in, request


def workload(rng: random.Random, count: int, longest: int):
    shared = [[rng.randrange(40) for _ in range(longest)] for _ in range(3)]
    for number in range(count):
        start = rng.choice(shared)[: rng.randrange(longest)]
        own = [rng.randrange(40) for _ in range(rng.randrange(1, longest))]
        priority = rng.choice([0, 0, 0, 20])
        salt = rng.choice(["", "", "tenant"])
        ids, new = start + own, rng.randrange(14)
        yield request(str(number), ids, new=new, priority=priority, cache_salt=salt)


def leak(world: World, rng: random.Random) -> bool:
    """Lose something, if there is something to lose."""
    kind = rng.choice(["pages", "lock", "unlock", "handle", "state"])
    cached = list(below(world.tree.roots().values()))
    if kind == "pages":
        return len(world.allocator.alloc(min(2, world.allocator.free_pages))) > 0
    if kind == "lock" and cached:
        world.tree.lock(rng.choice(cached))
        return True
    holders = [req.kv for req in holders_in(world.scheduler) if req.kv.node.parent is not None]
    if kind == "unlock" and holders:
        world.tree.unlock(rng.choice(holders).node)
        return True
    if kind == "handle" and holders:
        lost = world.cache.acquire(rng.choice(holders).key, 5)
        return lost.node.parent is not None or lost.state is not None
    return kind == "state" and world.states is not None and world.states._take({0}) > 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    pages=st.sampled_from([20, 60, 200]),
    page_size=st.sampled_from([1, 2, 4, 16]),
    inflight=st.sampled_from([1, 2]),
    states=st.sampled_from([0, 0, 6, 30]),
)
def test_what_is_lost_is_found(seed, pages, page_size, inflight, states):
    rng = random.Random(seed)
    pages *= 4 if page_size == 1 else 1
    world = World(
        pages=pages,
        page_size=page_size,
        policy=rng.choice(["fcfs", "lpm"]),
        eviction=rng.choice(["lru", "mru", "priority"]),
        inflight=inflight,
        states=states,
    )
    longest = min(rng.choice([14, 40]), pages * page_size // 3)
    room = world.cache.total_tokens
    todo = [
        r
        for r in workload(rng, 16, longest)
        if len(r.input_ids) + r.sampling.max_new_tokens <= room
    ]
    alive, found, lost = list(todo), 0, 0
    for _ in range(3000):
        world.clock.advance(0.01)
        for _ in range(rng.choice([0, 0, 1, 3])):
            if alive:
                world.scheduler.add(alive.pop())
        busy = world.scheduler.step()
        world.check()
        assert world.scheduler.audit() == 0, "something is found that was not lost"
        if rng.random() < 0.3 and leak(world, rng):
            lost += 1
            found += world.scheduler.audit() > 0
            world.check()
        if not busy and not alive and world.scheduler.idle:
            break
    else:
        raise AssertionError("some request never ends")

    assert found == lost
    for req in todo:
        assert world.tokens[req.rid] == alone(req)
    world.check_empty()
    world.cache.clear()
    assert world.allocator.free_pages == world.allocator.num_pages
