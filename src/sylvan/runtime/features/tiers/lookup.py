"""Finds the longest usable prefix in a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.features.tiers.keys import STATE, sibling, window_kind
from sylvan.runtime.features.tiers.opened import OpenedStore
from sylvan.runtime.features.tiers.work import Fetch


@dataclass(frozen=True, slots=True)
class Found:
    """A prefix of `stop` pages; 0: none beyond what the device has.

    Attributes:
        names: Names to read, by position.
        groups: Group of each name.
        windows: As `Fetched.windows`.
        state: Whether there is a recurrent state at its end.
    """

    stop: int = 0
    names: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    state: bool = False


def look_up(store: OpenedStore, fetch: Fetch, groups: Sequence[KVGroup]) -> Found:
    """Find the longest prefix from which layers of all groups can continue.

    Raises:
        StoreError: The store failed.
    """
    leading = _leading(store.contains(fetch.names))
    names = fetch.names[:leading]
    windows = [group for group in groups if group.kind == "window"]
    has_states = any(group.kind == "state" for group in groups)
    there = [
        store.contains([sibling(name, window_kind(index)) for name in names])
        for index in range(len(windows))
    ]
    states = store.contains([sibling(name, STATE) for name in names]) if has_states else ()
    for count in range(leading, 0, -1):
        stop = fetch.first + count
        if stop <= fetch.known:
            break
        if has_states and not states[count - 1]:
            continue
        starts = [_start(own, count) + fetch.first for own in there]
        if all(s <= g.first_page(stop * g.page_size) for s, g in zip(starts, windows, strict=True)):
            return _found(fetch, groups, stop, starts, has_states=has_states)
    return Found()


def _found(
    fetch: Fetch, groups: Sequence[KVGroup], stop: int, starts: Sequence[int], *, has_states: bool
) -> Found:
    """Return what to read for a prefix of `stop` pages."""
    read: list[tuple[str, int]] = []
    windows = [(i, group) for i, group in enumerate(groups) if group.kind == "window"]
    first_pages = [group.first_page(stop * group.page_size) for _, group in windows]
    needed = [max(pair) for pair in zip(starts, first_pages, strict=True)]
    for page in range(fetch.first, stop):
        name = fetch.names[page - fetch.first]
        if page >= fetch.known:
            read.append((name, 0))
        for index, (number, _) in enumerate(windows):
            if page >= needed[index]:
                read.append((sibling(name, window_kind(index)), number))
    if has_states:
        state = next(i for i, group in enumerate(groups) if group.kind == "state")
        read.append((sibling(fetch.names[stop - 1 - fetch.first], STATE), state))
    return Found(
        stop, tuple(n for n, _ in read), tuple(g for _, g in read), tuple(needed), has_states
    )


def _leading(found: Sequence[bool]) -> int:
    """Count the pages before the first missing one."""
    return next((i for i, there in enumerate(found) if not there), len(found))


def _start(found: Sequence[bool], stop: int) -> int:
    """Return from where on all pages up to `stop` exist."""
    at = stop
    while at > 0 and found[at - 1]:
        at -= 1
    return at
