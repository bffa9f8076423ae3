"""Messages between the halves of LoRA serving."""

from __future__ import annotations

import msgspec


class AdapterFiles(msgspec.Struct, frozen=True):
    """An adapter to read: its ID and its directory."""

    id: str
    path: str


class AdapterRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows [start, stop) of the step use the adapter in a slot."""

    slot: int
    start: int
    stop: int


class LoraWork(msgspec.Struct, frozen=True):
    """Work for the worker half, in this order.

    Attributes:
        drop: IDs whose host copies are freed.
        load: Adapters to read into host memory, concurrently with steps.
        slots: New adapter by slot, from this step on.
        rows: Rows of this step that use adapters.
    """

    drop: tuple[str, ...] = ()
    load: tuple[AdapterFiles, ...] = ()
    slots: dict[int, str] = {}
    rows: tuple[AdapterRows, ...] = ()


class LoraReport(msgspec.Struct, frozen=True):
    """Host copies read since the last report, and errors of those that failed."""

    loaded: tuple[str, ...] = ()
    failed: dict[str, str] = {}
