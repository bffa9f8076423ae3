"""Maintenance of a store: list, verify, prune, export and import pages."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import PageStore, StoredPage, is_name, kind_of, space_of
from sylvan.runtime.storage.manifest import Manifest, bind, decode_manifest, manifest_of
from sylvan.runtime.storage.record import Fault, RecordError, check_record

_MANIFEST = "manifest.json"
_BATCH = 256
_LARGEST_RECORD = 1 << 32


@dataclass(slots=True)
class Content:
    """The pages of one namespace.

    Attributes:
        pages: Number of pages by kind.
        num_bytes: Total size.
        used_s: Unix time of the last use; 0: unknown.
    """

    pages: dict[str, int] = field(default_factory=dict[str, int])
    num_bytes: int = 0
    used_s: float = 0.0

    def add(self, page: StoredPage) -> None:
        """Add a page."""
        kind = kind_of(page.name)
        self.pages[kind] = self.pages.get(kind, 0) + 1
        self.num_bytes += page.num_bytes
        self.used_s = max(self.used_s, page.used_s)


@dataclass(slots=True)
class Findings:
    """Result of a verification: number of valid pages, and names of the others by reason."""

    good: int = 0
    wrong: dict[Fault, list[str]] = field(default_factory=dict[Fault, list[str]])

    @property
    def wrong_names(self) -> list[str]:
        """Names of all invalid pages."""
        return [name for names in self.wrong.values() for name in names]


def contents(store: PageStore) -> dict[str, Content]:
    """Return the contents by namespace."""
    found: dict[str, Content] = {}
    for page in store.pages():
        found.setdefault(space_of(page.name), Content()).add(page)
    return found


def verify(store: PageStore) -> Findings:
    """Read and verify all pages.

    Raises:
        ConfigError: The manifest is unreadable.
        StoreError: The store is.
    """
    manifest, found = manifest_of(store), Findings()
    identity = manifest.identity if manifest is not None else None
    for page in store.pages():
        record = store.read(page.name)
        if record is None:
            continue  # deleted meanwhile
        try:
            check_record(page.name, record, identity)
            found.good += 1
        except RecordError as error:
            found.wrong.setdefault(error.fault, []).append(page.name)
    return found


def prune(
    store: PageStore, *, unused_since_s: float | None = None, max_bytes: int | None = None
) -> int:
    """Remove leftovers of dead processes, and the least recently used pages; return their number.

    Args:
        store: Any store.
        unused_since_s: Remove pages not used since this Unix time.
        max_bytes: Size to shrink to.
    """
    count = store.sweep()
    pages = sorted(store.pages(), key=lambda page: page.used_s)
    excess = sum(page.num_bytes for page in pages) - max_bytes if max_bytes is not None else 0
    gone: list[str] = []
    for page in pages:
        late = unused_since_s is not None and page.used_s < unused_since_s
        if late or excess > 0:
            gone.append(page.name)
            excess -= page.num_bytes
    _remove(store, gone)
    return count + len(gone)


def remove(store: PageStore, names: Iterable[str]) -> None:
    """Remove pages by name."""
    _remove(store, [*names])


def export_pages(store: PageStore, path: Path) -> int:
    """Write all valid pages to a tar file; return their number.

    Raises:
        ConfigError: The store is empty, or the file cannot be written.
    """
    manifest = manifest_of(store)
    if manifest is None:
        raise ConfigError("the store is bound to no model: nothing was ever written to it")
    count = 0
    try:
        with tarfile.open(path, "w") as archive:
            _add(archive, _MANIFEST, manifest.encode())
            for page in store.pages():
                record = store.read(page.name)
                if record is not None and _is_right(page.name, record, manifest):
                    _add(archive, page.name, record)
                    count += 1
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from None
    return count


def import_pages(store: PageStore, path: Path, where: str) -> int:
    """Import a tar file's pages into an empty store, or one of the same model; return their number.

    Raises:
        ConfigError: The file is invalid, or the store is of another model.
    """
    count, manifest = 0, None
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                data = _content(archive, member)
                if manifest is None:
                    manifest = _first(member.name, data, path)
                    bind(store, manifest, where)
                elif is_name(member.name) and _is_right(member.name, data, manifest):
                    store.write(member.name, data)
                    count += 1
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    if manifest is None:
        raise ConfigError(f"{str(path)!r} is empty")
    return count


def _first(name: str, data: bytes, path: Path) -> Manifest:
    if name != _MANIFEST:
        raise ConfigError(f"{str(path)!r} was not made by `sylvan cache export`")
    return decode_manifest(data)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not member.isreg() or member.size > _LARGEST_RECORD:
        return b""
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def _is_right(name: str, record: bytes, manifest: Manifest) -> bool:
    try:
        check_record(name, record, manifest.identity)
    except RecordError:
        return False
    return True


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _remove(store: PageStore, names: list[str]) -> None:
    for start in range(0, len(names), _BATCH):
        store.remove(names[start : start + _BATCH])
