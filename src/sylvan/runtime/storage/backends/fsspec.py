"""Object stores and file systems through fsspec: `s3://BUCKET/PREFIX`, `gs://`, `az://`, ...

One object per page. Eviction is left to the bucket's lifecycle rules, or to
`sylvan cache prune`.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import (
    Buffer,
    StoredPage,
    StoreError,
    StoreKind,
    StoreLimits,
    is_name,
    spread,
)

_AT_ONCE = 16  # concurrent lookups in a store without batch lookups
_S3 = ("s3", "s3a")
_TIMES = ("LastModified", "mtime", "created", "last_modified", "updated")


class ObjectStore:
    """Implements `PageStore` on an fsspec file system, below `root`."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root.rstrip("/")
        self._threads = ThreadPoolExecutor(_AT_ONCE, "sylvan-objects")
        self._binding = threading.Lock()

    def read_manifest(self) -> bytes | None:
        return self._read("manifest.json")

    def write_manifest(self, manifest: bytes) -> bytes:
        """See `PageStore.write_manifest`.

        If the store cannot write conditionally, the last of two servers that bind it
        simultaneously wins; pages carry their manifest's identity, so none is confused.
        """
        with self._binding:
            found = self.read_manifest()
            if found is None:
                self._write("manifest.json", manifest)
                found = self.read_manifest()
            return found or manifest

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        """Return which exist; uses are not recorded."""

        def exists(name: str) -> bool:
            with _named():
                return bool(self._system.exists(f"{self._root}/{name}"))

        return [*self._threads.map(exists, names)]

    def read(self, name: str) -> bytes | None:
        return self._read(name)

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        return spread(self.read(name), parts)

    def write(self, name: str, record: bytes) -> None:
        self._write(name, record)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                with _named(passing=FileNotFoundError):
                    self._system.rm_file(f"{self._root}/{name}")
            except FileNotFoundError:
                continue

    def pages(self) -> Iterator[StoredPage]:
        with _named():
            self._system.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._system.find(self._root, detail=True)
        for path, info in found.items():
            name = path[len(self._root) + 1 :]
            if is_name(name):
                yield StoredPage(name, int(info.get("size") or 0), _time_of(info))

    def sweep(self) -> int:
        """Do nothing: the bucket's rules do it."""
        return 0

    def clear(self) -> None:
        self.remove([*(page.name for page in self.pages()), "manifest.json"])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, name: str) -> bytes | None:
        try:
            with _named(passing=FileNotFoundError):
                return bytes(self._system.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        with _named():
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(path, data)


def _time_of(info: dict[str, Any]) -> float:
    """Return the write time of an object, if its store reports it."""
    for name in _TIMES:
        at = info.get(name)
        if isinstance(at, dt.datetime):
            return at.timestamp()
        if isinstance(at, int | float):
            return float(at)
    return 0.0


@contextmanager
def _named(passing: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Convert errors of any driver to StoreError."""
    try:
        yield
    except passing:
        raise
    except Exception as error:  # each driver has its own classes
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StoreError(f"the object store: {reason}") from error


def _check(url: str, limits: StoreLimits) -> None:
    if limits.max_bytes is not None or limits.space_bytes is not None or limits.ttl_s is not None:
        raise ConfigError(
            "tiers.max_bytes, tiers.namespace_bytes and tiers.ttl_s are not for object stores: "
            "give the bucket a lifecycle rule, or run `sylvan cache prune`"
        )
    _filesystem(url, limits)


def _filesystem(url: str, limits: StoreLimits) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            f"tiers.storage={url} needs another package: pip install 'sylvan[remote]'"
        ) from None
    try:
        return url_to_fs(url, **_bounds(url, limits.timeout_s))
    except ImportError as error:
        raise ConfigError(f"tiers.storage={url} needs another package: {error}") from None
    except ValueError as error:
        raise ConfigError(f"tiers.storage={url}: {error}") from None


def _bounds(url: str, timeout_s: float) -> dict[str, Any]:
    """Return options that keep drivers from waiting for minutes; S3's client tries for five."""
    if url.partition(":")[0].lower() not in _S3:
        return {}
    retries = {"max_attempts": 1, "mode": "standard"}
    waits = {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": retries}
    return {"config_kwargs": waits}


def _open(url: str, limits: StoreLimits) -> ObjectStore:
    _check(url, limits)
    system, root = _filesystem(url, limits)
    store = ObjectStore(system, root)
    store.read_manifest()
    return store


STORE = StoreKind(open=_open, check=_check)
