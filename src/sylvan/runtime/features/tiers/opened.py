"""A store opened for one manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvan.runtime.features.tiers.stores import identity_of, limits_of
from sylvan.runtime.features.tiers.work import StoreSpec
from sylvan.runtime.storage.api import PageStore
from sylvan.runtime.storage.cipher import Cipher, read_key
from sylvan.runtime.storage.find import open_store, shown
from sylvan.runtime.storage.manifest import bind, decode_manifest
from sylvan.runtime.storage.record import HEADER_BYTES, RecordCodec, RecordError


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store, and its record format. Names get the suffix of `spec`."""

    spec: StoreSpec
    pages: PageStore
    records: RecordCodec

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        """Return which of these exist.

        Raises:
            StoreError: The store failed.
        """
        return self.pages.contains([name + self.spec.suffix for name in names])

    def read(self, name: str, num_bytes: int) -> memoryview | None:
        """Read a page; None if it is missing.

        Raises:
            StoreError: The store failed.
            RecordError: The record is invalid.
        """
        name += self.spec.suffix
        record = self.pages.read(name)
        if record is None:
            return None
        payload = self.records.decode(name, record)
        if len(payload) != num_bytes:
            raise RecordError("foreign", f"{name} has {len(payload)} bytes, not {num_bytes}")
        return payload

    def read_into(self, name: str, page: memoryview) -> bool:
        """Read a page into memory; False if it is missing.

        Raises:
            StoreError: The store failed.
            RecordError: The record is invalid; the memory's contents are undefined.
        """
        if self.records.sealed:
            payload = self.read(name, len(page))
            page[:] = payload or page
            return payload is not None
        name += self.spec.suffix
        head = bytearray(HEADER_BYTES)
        size = self.pages.read_into(name, (head, page))
        if size is None:
            return False
        self.records.check(name, head, page, size)
        return True

    def write(self, name: str, payload: memoryview) -> int:
        """Write a page; return its stored size.

        Raises:
            StoreError: The store rejected it.
        """
        name += self.spec.suffix
        record = self.records.encode(name, payload)
        self.pages.write(name, record)
        return len(record)

    def clear(self) -> None:
        """Delete all pages.

        Raises:
            StoreError: The store failed.
        """
        self.pages.clear()
        self.pages.write_manifest(self.spec.manifest)


def open_spec(spec: StoreSpec) -> OpenedStore:
    """Open a store, and bind it to the manifest.

    Raises:
        ConfigError: It holds pages of another model, or cannot be opened this way.
        StoreError: It is unreachable.
    """
    cipher = Cipher(read_key(Path(spec.key_file))) if spec.key_file else None
    records = RecordCodec(identity_of(spec), cipher)
    pages = open_store(spec.url, limits_of(spec))
    bind(pages, decode_manifest(spec.manifest), shown(spec.url))
    return OpenedStore(spec, pages, records)
