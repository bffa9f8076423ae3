"""Where states are kept, what a hit may use of them, and that they go with their nodes."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.runtime.cache.types import CacheKey
from tests.support.kv import World, request

PAGE = 4


def run(world: World, rid: str, tokens, new: int = 1) -> int:
    """Serve one request; how many of its tokens were computed."""
    before = sum(stop - start for _, start, stop in world.executor.computed)
    world.scheduler.add(request(rid, tokens, new=new))
    world.run()
    world.check()
    return sum(stop - start for _, start, stop in world.executor.computed) - before


def world(**changes) -> World:
    return World(
        **{"page_size": PAGE, "states": 20, "chunk_tokens": 64, "max_batch_tokens": 64} | changes
    )


def test_repeated_prompt_computes_only_what_follows_its_last_page():
    here = world()

    assert run(here, "a", range(30)) == 30
    assert run(here, "b", range(30)) == 30 - 28
    assert run(here, "c", range(28)) == 28, "no state was kept inside"
    assert run(here, "d", range(28)) == 28 - 24, (
        "a prompt of whole pages continues one page earlier"
    )


def test_longer_prompt_continues_from_the_end_of_a_request_even_inside_a_page():
    here = world()
    run(here, "a", range(30), new=4)
    answer = here.tokens["a"]

    assert run(here, "b", [*range(30), *answer, 8, 9]) == 3, "the last answer token, and two more"


def test_prompt_that_branches_off_leaves_a_state_there_for_the_next():
    here = world()
    run(here, "a", range(30))

    assert run(here, "b", [*range(17), 40, 41]) == 19, "no state was kept at the branch"
    assert run(here, "c", [*range(17), 43, 42]) == 19 - 16
    assert run(here, "d", [*range(16), 44]) == 1


def test_chunks_leave_states_at_their_last_page():
    here = world(chunk_tokens=10)
    run(here, "a", range(30))

    stops = {node.stop for node in here.tree.states.holders.values()}
    assert stops == {8, 20, 28, 30}


def test_state_goes_with_its_node_when_pages_are_evicted():
    here = world(pages=10)
    run(here, "a", range(30))
    assert len(here.tree.states.holders) == 2

    run(here, "b", range(100, 136))

    assert here.cache.peek(CacheKey(np.arange(30, dtype=np.int32)), 29) == 0
    here.check()


def test_oldest_state_is_given_up_when_slots_run_out_and_its_pages_stay():
    here = world(states=4)
    run(here, "a", range(30))
    run(here, "b", range(50, 80))
    pages = here.tree.total_pages
    run(here, "c", range(30))

    assert here.states.free_slots == 0
    assert here.tree.total_pages >= pages


@pytest.mark.parametrize("states", [2, 3])
def test_requests_wait_for_slots_and_all_end(states):
    here = world(states=states, max_running_reqs=8)
    for i in range(6):
        here.scheduler.add(request(str(i), range(10 * i, 10 * i + 9), new=5))
    most = 0
    for _ in range(200):
        here.scheduler.step()
        here.check()
        most = max(most, len(here.scheduler.running))

    assert len(here.finish) == 6
    assert most <= states - 1
