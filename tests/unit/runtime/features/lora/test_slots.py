"""Slots keep what is used, and give way to what is needed."""

from __future__ import annotations

import pytest

from sylvan.runtime.features.lora.slots import AdapterSlots


def test_each_adapter_of_a_step_has_a_slot_of_its_own():
    slots = AdapterSlots(3, "lru")

    changed = slots.place(["a", "b", "a"], kept=())

    assert sorted(changed.values()) == ["a", "b"]
    assert changed == {slots["a"]: "a", slots["b"]: "b"}
    assert slots.used == 2
    assert slots.place(["b", "a"], kept=()) == {}


@pytest.mark.parametrize(("eviction", "leaves"), [("lru", "b"), ("fifo", "a")])
def test_who_leaves_first(eviction, leaves):
    slots = AdapterSlots(2, eviction)
    slots.place(["a"], kept=())
    slots.place(["b"], kept=())
    slots.place(["a"], kept=())
    place = slots[leaves]

    changed = slots.place(["c"], kept=())

    assert changed == {place: "c"}
    assert leaves not in slots


def test_neither_those_of_the_step_nor_those_that_are_kept_leave():
    slots = AdapterSlots(3, "lru")
    slots.place(["kept", "a", "b"], kept=())

    slots.place(["c", "b"], kept=("kept",))

    assert "kept" in slots
    assert "b" in slots
    assert "a" not in slots


def test_a_slot_that_was_freed_is_used_again():
    slots = AdapterSlots(1, "lru")
    slots.place(["a"], kept=())
    slots.remove("a")
    slots.remove("a")

    assert slots.place(["b"], kept=()) == {0: "b"}
    assert slots.used == 1
