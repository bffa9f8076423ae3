"""A store that was opened for one manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sylvan.runtime.features.tiers.data import StoreSpec
from sylvan.runtime.features.tiers.stores import identity_of, limits_of
from sylvan.runtime.storage.api import PageStore
from sylvan.runtime.storage.cipher import Cipher, read_key
from sylvan.runtime.storage.find import open_store, shown
from sylvan.runtime.storage.manifest import bind, decode_manifest
from sylvan.runtime.storage.record import HEADER_BYTES, RecordCodec, RecordError


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store, and the form in which it keeps pages."""

    spec: StoreSpec
    pages: PageStore
    records: RecordCodec

    def read(self, name: str, num_bytes: int) -> memoryview | None:
        """The bytes of a page; None if it is not there.

        Raises:
            StoreError: the store cannot be read.
            RecordError: what it has must not be used.
        """
        record = self.pages.read(name)
        if record is None:
            return None
        payload = self.records.decode(name, record)
        if len(payload) != num_bytes:
            raise RecordError("foreign", f"{name} has {len(payload)} bytes, not {num_bytes}")
        return payload

    def read_into(self, name: str, page: memoryview) -> bool:
        """Fill a page's memory; False if the page is not there.

        Raises:
            StoreError: the store cannot be read.
            RecordError: what it has must not be used; the memory holds anything then.
        """
        if self.records.sealed:
            payload = self.read(name, len(page))
            page[:] = payload or page
            return payload is not None
        head = bytearray(HEADER_BYTES)
        size = self.pages.read_into(name, (head, page))
        if size is None:
            return False
        self.records.check(name, head, page, size)
        return True

    def write(self, name: str, payload: memoryview) -> int:
        """Keep a page; returns its size there.

        Raises:
            StoreError: the store does not take it.
        """
        record = self.records.encode(name, payload)
        self.pages.write(name, record)
        return len(record)

    def clear(self) -> None:
        """Forget all pages.

        Raises:
            StoreError: the store cannot be emptied.
        """
        self.pages.clear()
        self.pages.write_manifest(self.spec.manifest)


def open_spec(spec: StoreSpec) -> OpenedStore:
    """Open a store, and bind it.

    Raises:
        ConfigError: it holds pages of another model, or it cannot be opened this way.
        StoreError: it cannot be reached.
    """
    cipher = Cipher(read_key(Path(spec.key_file))) if spec.key_file else None
    records = RecordCodec(identity_of(spec), cipher)
    pages = open_store(spec.url, limits_of(spec))
    bind(pages, decode_manifest(spec.manifest), shown(spec.url))
    return OpenedStore(spec, pages, records)
