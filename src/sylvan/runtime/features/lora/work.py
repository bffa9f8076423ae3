"""What crosses between the halves of LoRA serving."""

from __future__ import annotations

import msgspec


class AdapterFiles(msgspec.Struct, frozen=True):
    """An adapter to read: its id, and the directory where it lies."""

    id: str
    path: str


class AdapterRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows [start, stop) of the step are computed with the adapter in a slot."""

    slot: int
    start: int
    stop: int


class LoraWork(msgspec.Struct, frozen=True):
    """What the worker half does, in this order.

    Attributes:
        drop: Ids whose host copies go.
        load: Adapters whose host copies are to be read, beside the steps.
        slots: The adapter that is in a slot from this step on, by slot.
        rows: Of this step; those of requests without an adapter are not named.
    """

    drop: tuple[str, ...] = ()
    load: tuple[AdapterFiles, ...] = ()
    slots: dict[int, str] = {}
    rows: tuple[AdapterRows, ...] = ()


class LoraReport(msgspec.Struct, frozen=True):
    """Host copies that have been read since the last report, and those that could not be: why."""

    loaded: tuple[str, ...] = ()
    failed: dict[str, str] = {}
