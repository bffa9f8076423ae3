"""Messages between the two halves. They contain no tensors.

Pages are named as in `storage.api`. Groups are numbered as in `ExecutorCaps.kv_groups`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sylvan.runtime.storage.record import Fault

LoadResult = Literal["ok", "failed", "cancelled"]


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A store that every worker half opens.

    Attributes:
        url: URL of the store.
        manifest: Encoded `Manifest` that it must be bound to.
        epoch: Separates pages of replaced weights; empty unless weights were updated in place.
        max_bytes, space_bytes, ttl_s: As `StoreLimits`.
        key_file: The operator's key file, if pages are encrypted.
        default_url: What `file` stands for.
        suffix: Of the names of a rank's own pages; set by its worker half.
    """

    url: str
    manifest: bytes
    epoch: str = ""
    max_bytes: int | None = None
    space_bytes: int | None = None
    ttl_s: float | None = None
    key_file: str | None = None
    default_url: str = ""
    suffix: str = ""


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A page of a group on the device, or a recurrent state slot, and its name in the store."""

    group: int
    page: int
    name: str


class HostPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of a group on the device, or a recurrent state slot, and its slot in the host tier.

    Each group has its own slots.
    """

    group: int
    page: int
    slot: int


class Save(msgspec.Struct, frozen=True):
    """Copy pages to the host tier. If they are reused meanwhile, the copy is void."""

    job: int
    pages: tuple[HostPage, ...]


class Export(msgspec.Struct, frozen=True):
    """Copy pages to host memory. They may be reused meanwhile: see `Commit`.

    With `from_host`, page numbers are slots of the host tier.
    """

    job: int
    pages: tuple[Page, ...]
    from_host: bool = False


class Commit(msgspec.Struct, frozen=True):
    """After an export: write these pages to the store, drop the others."""

    job: int
    names: tuple[str, ...]


class Fetch(msgspec.Struct, frozen=True):
    """Look up which pages of a prefix the store has, and read them into host memory.

    `names` are those of the first group from page `first` of the prefix on; names of other data
    for a page derive from them. The first `known` pages of the prefix are on the device
    and are not read. Reading stops at the first page that is missing or corrupt.
    """

    job: int
    first: int
    known: int
    names: tuple[str, ...]


class LoadPages(msgspec.Struct, frozen=True):
    """Fill pages of the device: `pages` from the store or a fetch, `saved` from the host tier."""

    job: int
    pages: tuple[Page, ...]
    saved: tuple[HostPage, ...] = ()


class TiersWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New work for the worker half.

    `urgent` are exports whose pages this step reuses: they are copied before it runs.
    `stops` are fetches that must read no more, `releases` those whose pages are no longer needed,
    `cancels` are loads. `attach` opens a store, replacing the current one; `detach` closes
    it; `clear` empties it.
    """

    saves: tuple[Save, ...] = ()
    exports: tuple[Export, ...] = ()
    urgent: tuple[int, ...] = ()
    commits: tuple[Commit, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    loads: tuple[LoadPages, ...] = ()
    stops: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()
    attach: StoreSpec | None = None
    detach: bool = False
    clear: bool = False


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A save ended."""

    job: int
    ok: bool
    num_bytes: int = 0
    seconds: float = 0.0


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """An export ended."""

    job: int
    ok: bool


class Persisted(msgspec.Struct, frozen=True, tag="persisted"):
    """Committed pages are in the store, except `lost`."""

    job: int
    num_pages: int
    num_bytes: int
    seconds: float
    lost: tuple[str, ...] = ()
    error: str = ""


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Progress of a fetch; the last report of a job has `done`.

    Attributes:
        found: Pages of the longest usable prefix; 0: none.
        arrived: Pages of the longest usable prefix in host memory.
        windows: For each window group, the page from which the store has all up to the last found.
        stopped: It ended before the store had answered everything.
        state: Whether there is a recurrent state after the last page found.
        num_bytes: Bytes read so far.
        seconds: Time since the fetch began.
        faults: Rejected records, by reason.
        error: Error of the store.
    """

    job: int
    found: int
    arrived: int
    done: bool
    windows: tuple[int, ...] = ()
    state: bool = False
    num_bytes: int = 0
    seconds: float = 0.0
    faults: dict[Fault, int] = {}
    error: str = ""
    stopped: bool = False


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A load ended: everything is on the device, or nothing is usable.

    `num_bytes` were written to the device, of which `saved_bytes` came from the host tier, taking
    `saved_seconds` of the `seconds`.
    """

    job: int
    outcome: LoadResult
    num_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0
    faults: dict[Fault, int] = {}
    error: str = ""


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """A store was opened, or failed to open; `status` is an HTTP status."""

    url: str
    error: str = ""
    status: int = 400


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The store was emptied, or the error."""

    error: str = ""


Event = Saved | Exported | Persisted | Fetched | Loaded | Attached | Cleared
Events = tuple[Event, ...]
