"""What passes between the two halves. Nothing here is a tensor.

A page is named as in `storage.api`. Groups count as in `ExecutorCaps.kv_groups`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sylvan.runtime.storage.record import Fault

Outcome = Literal["ok", "failed", "cancelled"]


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A store to be opened by every worker half.

    Attributes:
        url: Of the store.
        manifest: Encoded `Manifest` that it has to be bound to.
        epoch: Makes pages unlike all others; empty unless weights were replaced in place.
        max_bytes, space_bytes, ttl_s: As `StoreLimits`.
        key_file: The operator's key, if pages are encrypted.
        default_url: What `file` stands for.
    """

    url: str
    manifest: bytes
    epoch: str = ""
    max_bytes: int | None = None
    space_bytes: int | None = None
    ttl_s: float | None = None
    key_file: str | None = None
    default_url: str = ""


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A page of a group on the device, or a slot of recurrent state, and its name in the store."""

    group: int
    page: int
    name: str


class HostPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of a group on the device, or a slot of recurrent state, and its slot in the host tier.

    Each group has slots of its own.
    """

    group: int
    page: int
    slot: int


class Save(msgspec.Struct, frozen=True):
    """Copy pages to the host tier. They may be given to others meanwhile: the copy is void then."""

    job: int
    pages: tuple[HostPage, ...]


class Export(msgspec.Struct, frozen=True):
    """Copy pages to host memory. They may be given to others meanwhile: see `Commit`.

    With `from_host` the numbers of the pages are slots of the host tier.
    """

    job: int
    pages: tuple[Page, ...]
    from_host: bool = False


class Commit(msgspec.Struct, frozen=True):
    """Of an export that ended: write these to the store, forget the others."""

    job: int
    names: tuple[str, ...]


class Fetch(msgspec.Struct, frozen=True):
    """Look which of a prefix's pages the store has, and read them into host memory.

    `names` are those of the first group from page `first` of the prefix on; what is kept beside a
    page has names that follow from its own. The first `known` pages of the prefix are on the device
    and need not be read. Reading ends at the first page that is not there, or not right.
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
    """What the worker half is to begin.

    `urgent` are exports whose pages this step gives to others: they are copied before it runs.
    `stops` are fetches that are to read no more, `releases` those whose pages nobody will load any
    more; `cancels` are loads. `attach` opens a store, instead of the one before; `detach` closes
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
    """A save has ended."""

    job: int
    ok: bool
    num_bytes: int = 0
    seconds: float = 0.0


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """An export has ended."""

    job: int
    ok: bool


class Persisted(msgspec.Struct, frozen=True, tag="persisted"):
    """What was committed is in the store, but for `lost`."""

    job: int
    num_pages: int
    num_bytes: int
    seconds: float
    lost: tuple[str, ...] = ()
    error: str = ""


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """How far a fetch is; the last one of a job has `done`.

    Attributes:
        found: Pages of the longest prefix that a request could use; 0: none.
        arrived: The same, of what is in host memory.
        windows: For each window group, from which page on the store has all up to the last found.
        stopped: It was over before the store had answered everything.
        state: Whether there is a recurrent state after the last page found.
        num_bytes: Read so far.
        seconds: Since the fetch began.
        faults: Records that must not be used, by why.
        error: Why the store could not be read.
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
    """A load has ended: all of it is on the device, or nothing of it may be used.

    `num_bytes` were filled on the device, `saved_bytes` of these from the host tier, which took
    `saved_seconds` of the `seconds`.
    """

    job: int
    outcome: Outcome
    num_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0
    faults: dict[Fault, int] = {}
    error: str = ""


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """A store was opened, or why not; `status` is that of HTTP."""

    url: str
    error: str = ""
    status: int = 400


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The store was emptied, or why not."""

    error: str = ""


Event = Saved | Exported | Persisted | Fetched | Loaded | Attached | Cleared
Events = tuple[Event, ...]
