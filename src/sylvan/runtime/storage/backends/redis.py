"""Redis or Valkey: `redis://[:PASSWORD@]HOST[:PORT]/[DB][?prefix=NAME]`; `rediss://` for TLS.

Eviction when its memory is full is the server's own setting (`maxmemory-policy allkeys-lru`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

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

_SCAN = 1000
DEFAULT_PREFIX = "sylvan"


class RedisStore:
    """Implements `PageStore`; `client` is a `redis.Redis` that returns bytes."""

    def __init__(self, client: Any, prefix: str, limits: StoreLimits) -> None:
        self._client, self._prefix = client, f"{prefix}:"
        self._ttl_ms = None if limits.ttl_s is None else max(1, round(limits.ttl_s * 1000))

    def read_manifest(self) -> bytes | None:
        with _named():
            return self._client.get(self._prefix + "manifest")

    def write_manifest(self, manifest: bytes) -> bytes:
        with _named():
            self._client.set(self._prefix + "manifest", manifest, nx=True)
            return self._client.get(self._prefix + "manifest") or manifest

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        with _named(), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                if self._ttl_ms is None:
                    pipe.exists(self._prefix + name)
                else:
                    pipe.pexpire(self._prefix + name, self._ttl_ms)
            return [bool(found) for found in pipe.execute()]

    def read(self, name: str) -> bytes | None:
        with _named():
            return self._client.get(self._prefix + name)

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        return spread(self.read(name), parts)

    def write(self, name: str, record: bytes) -> None:
        with _named():
            self._client.set(self._prefix + name, record, px=self._ttl_ms)

    def remove(self, names: Sequence[str]) -> None:
        if names:
            with _named():
                self._client.unlink(*(self._prefix + name for name in names))

    def pages(self) -> Iterator[StoredPage]:
        with _named():
            for key in self._client.scan_iter(match=self._prefix + "*/*", count=_SCAN):
                name = key.decode()[len(self._prefix) :]
                if is_name(name):
                    yield StoredPage(name, int(self._client.strlen(key)))

    def sweep(self) -> int:
        """Do nothing: the server does it."""
        return 0

    def clear(self) -> None:
        with _named():
            self._client.delete(self._prefix + "manifest")
        names = [page.name for page in self.pages()]
        for start in range(0, len(names), _SCAN):
            self.remove(names[start : start + _SCAN])

    def close(self) -> None:
        self._client.close()


@contextmanager
def _named() -> Iterator[None]:
    import redis

    try:
        yield
    except redis.RedisError as error:
        raise StoreError(f"Redis: {error}") from error


def _check(url: str, limits: StoreLimits) -> None:
    if limits.max_bytes is not None or limits.space_bytes is not None:
        raise ConfigError(
            "tiers.max_bytes and tiers.namespace_bytes are not for Redis: set maxmemory and "
            "maxmemory-policy there"
        )
    if importlib.util.find_spec("redis") is None:
        raise ConfigError(f"tiers.storage={url} needs another package: pip install 'sylvan[redis]'")


def _open(url: str, limits: StoreLimits) -> RedisStore:
    _check(url, limits)
    import redis

    parts = urlsplit(url.replace("valkey", "redis", 1))
    query = parse_qs(parts.query)
    prefix = query.pop("prefix", [DEFAULT_PREFIX])[-1]
    address = urlunsplit(parts._replace(query=urlencode(query, doseq=True)))
    times = ("socket_timeout", "socket_connect_timeout")
    waits = {name: limits.timeout_s for name in times if name not in query}
    try:
        client = redis.Redis.from_url(address, **waits)
    except (ValueError, redis.RedisError) as error:
        raise ConfigError(f"tiers.storage: {error}") from None
    with _named():
        client.ping()
    return RedisStore(client, prefix, limits)


STORE = StoreKind(open=_open, check=_check)
