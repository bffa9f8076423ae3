"""Recurrent states: whatever is cached, chunked or preempted, each stands for its tokens."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_scheduler import expected, workload
from tests.support.kv import World


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    pages=st.sampled_from([12, 20, 60, 200]),
    page_size=st.sampled_from([1, 2, 4, 8, 16]),
    inflight=st.sampled_from([1, 2, 3]),
    chunk=st.sampled_from([1, 3, 16, 64]),
    states=st.sampled_from([2, 3, 6, 9, 30]),
    prefix=st.booleans(),
    share=st.booleans(),
)
def test_every_state_is_of_its_own_history(
    seed, pages, page_size, inflight, chunk, states, prefix, share
):
    rng = random.Random(seed)
    pages *= 4 if page_size == 1 else 1
    world = World(
        pages=pages,
        page_size=page_size,
        policy=rng.choice(["fcfs", "lpm"]),
        prefix=prefix,
        inflight=inflight,
        chunk_tokens=chunk,
        max_batch_tokens=rng.choice([16, 64]),
        share_in_batch=share,
        states=states,
    )
    longest = min(rng.choice([14, 40]), pages * page_size // 3)
    room = world.cache.total_tokens
    todo = [
        r
        for r in workload(rng, 20, longest)
        if len(r.input_ids) + r.sampling.max_new_tokens <= room
    ]
    aborted, alive = set(), list(todo)
    for _ in range(5000):
        world.clock.advance(0.01)
        for _ in range(rng.choice([0, 0, 1, 3])):
            if alive:
                world.scheduler.add(alive.pop())
        if rng.random() < 0.05 and todo:
            victim = rng.choice(todo).rid
            if victim not in world.finish and all(r.rid != victim for r in alive):
                world.scheduler.abort(victim)
                aborted.add(victim)
        busy = world.scheduler.step()
        world.check()
        if not busy and not alive and world.scheduler.idle:
            break
    else:
        raise AssertionError("some request never ends")

    assert set(world.finish) == {r.rid for r in todo}
    for req in todo:
        got, want = world.tokens[req.rid], expected(req)
        if req.rid in aborted and world.finish[req.rid].type == "abort":
            assert got == want[: len(got)]
        else:
            assert got == want
    world.check_empty()
    world.cache.clear()
    assert world.states.free_slots == world.states.num_slots
