"""Window layers: whatever is cached, chunked or preempted, what a token reads is there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.support.kv import World, alone, request
from tests.support.scheduler_inputs import setups
from tests.support.scheduler_machine import SchedulerMachine

WINDOWS = st.sampled_from([(8,), (1,), (20,), (4, 33), (100,)])


class WindowScheduler(SchedulerMachine):
    """Models with window layers, with and without layers that read everything."""

    @initialize(
        setup=setups(states=st.sampled_from([0, 0, 0, 9])),
        windows=WINDOWS,
        spare=st.sampled_from([1, 2, 9, 40]),
        has_full=st.sampled_from([True, True, False]),
    )
    def begin(self, setup, windows, spare, has_full):
        groups = {"windows": windows, "window_pages": spare, "has_full": has_full}
        self.start(setup | groups)


TestWindowScheduler = WindowScheduler.TestCase
TestWindowScheduler.settings = settings(
    max_examples=40, stateful_step_count=40, report_multiple_bugs=False
)


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("has_full", [True, False])
def test_a_long_request_holds_the_pages_of_its_window_only(inflight, has_full):
    world = World(pages=200, page_size=4, windows=[(16, 30)], inflight=inflight, has_full=has_full)
    window = world.cache._windows[0]
    asked = request("a", range(100), new=200)
    world.scheduler.add(asked)
    most = 0
    while not world.scheduler.idle:
        world.scheduler.step()
        world.check()
        held = window.allocator.num_pages - window.available_pages
        most = max(most, held)

    assert world.tokens["a"] == alone(asked)
    assert most <= window.group.min_pages(16)
    world.check_empty()


def test_the_next_turn_finds_the_window_before_its_new_tokens():
    world = World(pages=200, page_size=4, windows=[(16, 30)])
    world.scheduler.add(request("a", range(50), new=30))
    world.run()
    turn = [*range(50), *world.tokens["a"], 7, 8]
    world.scheduler.add(request("b", turn, new=5))
    world.run()

    assert world.tokens["b"] == alone(request("b", turn, new=5))
    assert world.outputs["b"][-1].usage.cached_tokens == 79  # the last output has no KV
    world.check_empty()


def test_a_prefix_whose_window_is_gone_is_computed_again():
    world = World(pages=400, page_size=4, windows=[(16, 30)])
    first = request("a", range(60), new=2)
    world.scheduler.add(first)
    world.run()
    for number in range(6):  # others take the window pages, but not those of full layers
        world.scheduler.add(request(f"o{number}", range(number, number + 60), new=20))
        world.run()
    world.scheduler.add(request("b", [*range(60), 9], new=2))
    world.run()

    assert world.tokens["b"] == alone(request("b", [*range(60), 9], new=2))
    assert world.outputs["b"][-1].usage.cached_tokens == 0
    world.check_empty()
