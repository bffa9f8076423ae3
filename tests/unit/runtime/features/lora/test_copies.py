"""Host copies stay within their bounds, and come back when they are asked for."""

from __future__ import annotations

import pytest

from sylvan.runtime.features.lora.copies import AdapterEntry, Copy, HostCopies
from sylvan.runtime.features.lora.work import AdapterFiles


def adapter(name: str, num_bytes: int = 1, **fields: object) -> AdapterEntry:
    return AdapterEntry(name, f"/{name}", num_bytes, **fields)


def wanted(copies: HostCopies, name: str) -> bool:
    found = copies.get(name)
    assert found is not None
    found.requests.add(f"request of {name}")
    return copies.use(found)


def test_a_copy_that_is_asked_for_is_read_and_the_one_used_longest_ago_goes():
    copies = HostCopies(2, 100)
    for name in "ab":
        copies.add(adapter(name), resident=True)
    copies.add(adapter("c"), resident=False)
    assert copies.use(copies.get("a"))

    assert not wanted(copies, "c")
    assert copies.next_loads() == (["b"], [AdapterFiles("c", "/c")])
    assert copies.loading
    copies.loaded("c")

    assert wanted(copies, "c")
    assert copies.get("b").copy is Copy.ABSENT
    assert copies.num_resident == 2


def test_copies_beyond_the_bound_go_when_no_other_is_requested():
    copies = HostCopies(2, 100)
    assert copies.has_room
    for name in "abc":
        copies.add(adapter(name, pinned=name == "a"), resident=True)
    assert not copies.has_room

    assert copies.has_work
    assert copies.next_loads() == (["b"], [])
    assert not copies.has_work


def test_bytes_bound_copies_too():
    copies = HostCopies(100, 10)
    copies.add(adapter("large", 8), resident=True)
    copies.add(adapter("small", 2), resident=True)
    copies.add(adapter("new", 5), resident=False)

    wanted(copies, "new")

    assert copies.next_loads() == (["large"], [AdapterFiles("new", "/new")])


def test_copies_in_use_pinned_ones_and_those_just_read_for_somebody_stay():
    copies = HostCopies(3, 100)
    copies.add(adapter("pinned", pinned=True), resident=True)
    copies.add(adapter("running"), resident=True)
    copies.get("running").running.add("1")
    copies.add(adapter("fresh"), resident=False)
    wanted(copies, "fresh")
    assert copies.next_loads() == ([], [AdapterFiles("fresh", "/fresh")])
    copies.loaded("fresh")
    copies.add(adapter("late"), resident=False)

    wanted(copies, "late")
    assert copies.next_loads() == ([], [])
    copies.get("fresh").requests.clear()  # its request was aborted

    assert copies.next_loads() == (["fresh"], [AdapterFiles("late", "/late")])


def test_the_longest_waiting_is_read_first():
    copies = HostCopies(10, 10)
    copies.add(adapter("used", 6), resident=True)
    copies.get("used").running.add("1")
    for name, size in (("large", 5), ("small", 2)):
        copies.add(adapter(name, size), resident=False)
        wanted(copies, name)

    assert copies.next_loads() == ([], [])
    copies.get("used").running.clear()

    dropped, loads = copies.next_loads()
    assert dropped == ["used"]
    assert [load.id for load in loads] == ["large", "small"]


def test_a_copy_that_cannot_be_read_leaves_its_place():
    copies = HostCopies(1, 100)
    copies.add(adapter("a"), resident=False)
    wanted(copies, "a")
    copies.next_loads()

    copies.failed("a", "gone")

    assert copies.get("a").error == "gone"
    assert copies.num_resident == 0
    assert not copies.loading


def test_what_was_unloaded_goes_with_its_last_request():
    copies = HostCopies(5, 100)
    copies.add(adapter("a"), resident=True)
    wanted(copies, "a")
    copies.leave(copies.get("a"))
    assert copies.next_loads() == ([], [])
    assert not copies.has_work

    copies.get("a").requests.clear()

    assert copies.has_work
    assert copies.next_loads() == (["a"], [])
    assert copies.get("a") is None
    assert not copies.has_work


def test_a_request_that_left_has_nothing_read():
    copies = HostCopies(5, 100)
    copies.add(adapter("a"), resident=False)
    wanted(copies, "a")
    copies.get("a").requests.clear()

    assert copies.next_loads() == ([], [])
    assert not copies.has_work
    assert copies.get("a").copy is Copy.ABSENT


@pytest.mark.parametrize(("most", "max_bytes"), [(8, 9), (1, 100)])
def test_one_that_never_fits_is_rejected_and_delays_no_other(most, max_bytes):
    """Beside those that are pinned there is no room, whoever else goes."""
    copies = HostCopies(most, max_bytes)
    copies.add(adapter("pinned", 5, pinned=True), resident=True)
    copies.add(adapter("large", 5), resident=False)
    wanted(copies, "large")

    assert copies.next_loads() == ([], [])

    assert "no room in host memory: it takes 5 bytes" in copies.get("large").error
    assert not copies.has_work
    copies.add(adapter("small", 4), resident=False)
    wanted(copies, "small")
    assert [load.id for load in copies.next_loads()[1]] == (["small"] if most > 1 else [])
