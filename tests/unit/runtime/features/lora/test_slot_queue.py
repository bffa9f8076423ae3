"""No adapter waits forever for a slot."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sylvan.runtime.features.lora.slot_queue import SlotQueue


def test_adapters_that_run_and_those_with_a_free_slot_start():
    turns = SlotQueue(2, max_overtakes=4)
    turns.next_step()

    assert turns.may_start("1", "a", {}, ())
    assert turns.may_start("2", "a", {"a": 1}, ())
    assert turns.may_start("3", "b", {"a": 1}, ())
    assert not turns.may_start("4", "c", {"a": 1, "b": 1}, ())
    assert not turns.may_start("5", "c", {"a": 1}, ("pinned",))
    assert turns.may_start("6", "pinned", {"a": 1}, ("pinned",))


def test_an_adapter_that_is_pinned_late_waits_until_there_is_a_place():
    turns = SlotQueue(2, max_overtakes=2)
    turns.next_step()

    assert not turns.may_start("1", "pinned", {"a": 1, "b": 2}, ("pinned",))
    for number in range(2):
        turns.started(f"a{number}", "a")
    assert not turns.may_start("a2", "a", {"a": 1, "b": 2}, ("pinned",))
    assert turns.draining == "a"
    turns.next_step()
    assert turns.may_start("1", "pinned", {"b": 2}, ("pinned",))


def test_a_free_slot_is_that_of_the_adapter_that_waited_longest():
    turns = SlotQueue(1, max_overtakes=100)
    turns.next_step()
    for rid, adapter in (("1", "first"), ("2", "second")):
        assert not turns.may_start(rid, adapter, {"a": 1}, ())
    turns.next_step()

    assert not turns.may_start("2", "second", {}, ())
    assert turns.may_start("1", "first", {}, ())


def test_one_that_left_delays_no_other():
    turns = SlotQueue(1, max_overtakes=100)
    turns.next_step()
    for rid, adapter in (("1", "first"), ("2", "second")):
        assert not turns.may_start(rid, adapter, {"a": 1}, ())

    turns.ended("1", "first")

    assert turns.may_start("2", "second", {}, ())


def test_nor_does_one_that_cannot_start_for_another_reason():
    turns = SlotQueue(1, max_overtakes=100)
    turns.next_step()
    assert not turns.may_start("1", "first", {"a": 1}, ())
    for _ in range(3):  # no request needs it
        turns.next_step()

    assert turns.may_start("2", "second", {}, ())


def test_the_adapter_with_the_fewest_requests_makes_room():
    turns = SlotQueue(2, max_overtakes=3)
    running = {"busy": 5, "idle": 1}
    turns.next_step()
    assert not turns.may_start("1", "waits", running, ())
    for number in range(3):
        assert turns.may_start(f"b{number}", "busy", running, ())
        turns.started(f"b{number}", "busy")

    assert turns.may_start("b3", "busy", running, ())
    assert not turns.may_start("i1", "idle", running, ())
    assert turns.draining == "idle"
    turns.next_step()
    assert turns.may_start("1", "waits", {"busy": 6}, ())
    turns.started("1", "waits")
    assert turns.draining is None
    assert not turns.may_start("i1", "idle", {"busy": 6, "waits": 1}, ())


def steps_until_all_rare_start(
    turns: SlotQueue, slots: int, rare: int, length: int, most: int
) -> int:
    """Every slot has an adapter with a new request in each step, asked before the rare ones."""
    ends: dict[str, tuple[str, int]] = {}
    waiting = {f"r{n}": f"rare{n}" for n in range(rare)}
    for step in range(most):
        turns.next_step()
        for rid, (adapter, end) in tuple(ends.items()):
            if end == step:
                del ends[rid]
                turns.ended(rid, adapter)
        running = Counter(adapter for adapter, _ in ends.values())
        asked = {f"p{n}-{step}": f"popular{n}" for n in range(slots)} | waiting
        for rid, adapter in asked.items():
            if turns.may_start(rid, adapter, running, ()):
                turns.started(rid, adapter)
                waiting.pop(rid, None)
                running[adapter] += 1
                assert len(running) <= slots
                ends[rid] = adapter, step + length
            elif rid not in waiting:
                turns.ended(rid, adapter)  # it goes elsewhere
        if not waiting:
            return step
    return most


@given(
    slots=st.integers(1, 4),
    overtakes=st.integers(1, 12),
    rare=st.integers(1, 4),
    length=st.integers(2, 9),
)
def test_an_adapter_starts_within_the_bound_however_popular_others_are(
    slots, overtakes, rare, length
):
    """Each has to be overtaken so often, by one request a step at least, and to wait for an end."""
    bound = rare * (overtakes + length + 2)

    turns = SlotQueue(slots, overtakes)
    assert steps_until_all_rare_start(turns, slots, rare, length, 2 * bound) <= bound

    turns = SlotQueue(slots, max_overtakes=10**9)
    assert steps_until_all_rare_start(turns, slots, rare, length, 2 * bound) == 2 * bound
