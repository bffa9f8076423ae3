"""Each kind of memory that a bug may lose is found, taken back, and counted."""

from __future__ import annotations

import pytest

from sylvan.runtime.cache.audit import locks_of
from sylvan.runtime.cache.types import Node, below
from tests.support.kv import World, request


def nodes(world: World) -> list[Node]:
    return sorted(below(world.tree.roots().values()), key=lambda n: (n.start, *n.tokens))


def path(node: Node) -> list[Node]:
    return [node, *path(node.parent)] if node.parent is not None else []


def world(*, busy: bool = False, **changes) -> World:
    """Two cached prompts with a common start; if `busy`, a request continues from one of them."""
    made = World(pages=50, page_size=2, **changes)
    made.scheduler.add(request("a", [1, 2, 3, 4, 5, 6], new=3))
    made.scheduler.add(request("b", [1, 2, 3, 4, 9, 8], new=3))
    made.run()
    if busy:
        made.scheduler.add(request("c", [1, 2, 3, 4, 5, 6, 7, 7], new=30))
        made.scheduler.step()
        assert [n.locks for n in nodes(made)].count(0) < len(nodes(made))
    made.check()
    assert made.scheduler.audit() == 0
    return made


def counts(made: World) -> tuple[int, int, int]:
    load = made.scheduler.load()
    return load.repaired_pages, load.repaired_locks, load.repaired_states


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_leaked_lock_is_found_and_its_nodes_can_be_evicted_again(busy, which):
    made = world(busy=busy)
    leaked = nodes(made)[which]
    made.tree.lock(leaked)  # a bug
    assert made.scheduler.audit() == len(path(leaked))
    made.check()
    assert made.scheduler.audit() == 0
    made.run()

    assert counts(made) == (0, len(path(leaked)), 0)
    made.cache.clear()
    assert made.allocator.free_pages == made.allocator.num_pages


def test_lock_taken_from_a_running_request_is_given_back_before_its_prefix_is_evicted():
    made = world(busy=True)
    used = made.scheduler.running[0].kv.node
    made.tree.unlock(used)  # a bug
    assert made.scheduler.audit() == len(path(used))
    made.check()
    made.cache.clear()
    made.run()
    made.check_empty()


def test_leaked_request_costs_neither_its_pages_nor_its_prefix():
    made = world(busy=True, states=6)
    req = made.scheduler.running[0]
    key = req.kv.key
    lost = made.cache.acquire(key, 6, step=made.scheduler._planner.step)
    assert made.cache.extend(lost, 14)
    mine = lost.num_pages - lost.shared
    made.cache.take_copies()
    del lost  # a bug: it was not released

    assert made.scheduler.audit() > 0
    pages, locks, states = counts(made)
    assert (pages, states) == (mine, 1)
    assert locks > 0
    made.check()
    made.run()
    made.check_empty()


def test_leaked_state_slots_are_found():
    made = world(busy=True, states=6)
    for _ in range(2):
        assert made.states._take({0})  # a bug; the second is taken from the tree
    lost = made.states.num_slots - made.states.free_slots - len(made.tree.states.holders) - 1
    assert lost == 2
    assert made.scheduler.audit() == 2
    assert counts(made) == (0, 0, 2)
    made.check()
    made.run()
    made.check_empty()


def test_leaf_that_eviction_does_not_find_is_found():
    made = world()
    while made.tree.heap.pop():  # a bug: they are not queued again
        pass
    assert made.scheduler.audit() == 0, "nobody missed them yet"
    made.scheduler.add(request("big", range(90), new=5))
    for _ in range(20):
        made.scheduler.step()
    assert "big" not in made.tokens

    assert made.scheduler.audit() > 0
    made.check()
    made.run()
    assert len(made.tokens["big"]) == 5


@pytest.mark.parametrize("states", [0, 99])
def test_audit_of_sound_memory_looks_only_at_what_requests_use(states, monkeypatch):
    made = World(pages=4000, page_size=1, max_running_reqs=8, states=states)
    for number in range(200):
        made.scheduler.add(request(f"w{number}", [1, 2, 3, number, *range(9)], new=1))
    made.run()
    for number in range(8):
        made.scheduler.add(request(f"r{number}", [1, 2, 3, number, 7, 7, number], new=9))
    for _ in range(6):
        made.scheduler.step()
    assert len(made.scheduler.running) == 8

    def walk(*_):
        raise AssertionError("the whole tree is walked")

    monkeypatch.setattr(made.tree, "repair_locks", walk)
    monkeypatch.setattr(made.tree, "all_pages", walk)
    assert made.scheduler.audit() == 0
    used = locks_of(req.kv.node for req in made.scheduler.running)
    assert len(used) < 40 < len(nodes(made))


def test_without_a_prefix_cache_only_pages_can_be_lost():
    made = World(pages=50, page_size=2, prefix=False)
    made.scheduler.add(request("a", [1, 2, 3], new=9))
    made.scheduler.step()
    assert made.scheduler.audit() == 0
    made.allocator.alloc(3)  # a bug
    assert made.scheduler.audit() == 3
    made.run()
    made.check_empty()
