"""Mooncake's store, memory of many machines: `mooncake://MASTER:PORT[/PREFIX][?NAME=VALUE...]`.

The master locates pages; they travel between machines over TCP or RDMA. Its package is
`mooncake-transfer-engine`, or `mooncake-transfer-engine-non-cuda` without CUDA.

A page lives as long as the process whose memory holds it, and until the master needs the space:
memory lent by this server (`segment`) goes with it, that of `mooncake_client` does not.
"""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from sylvan.config.parse import parse_size
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

MODULE = "mooncake.store"
DEFAULT_PORT, ADMIN_PORT = 50051, 9003
_NO_ROOM, _NOT_FOUND = -200, -704  # ErrorCode of mooncake-store/include/types.h
_LARGEST_LIST = 1 << 30
_JOIN_S = 10.0  # seconds in which a process starts and joins a healthy store
_PROBE = """
import json, sys
from mooncake.store import MooncakeDistributedStore
MooncakeDistributedStore().setup(*json.loads(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Options in the URL.

    Attributes:
        metadata: Server of the transfer engine's metadata; `P2PHANDSHAKE`: none is needed.
        protocol: `tcp` or `rdma`.
        devices: Of RDMA, by name, with commas between them.
        host: Name or address of this machine, for others; default: that which the master sees.
        segment: Bytes of this server's memory that the store may use.
        buffer: Bytes of memory through which pages pass here.
        admin: Address of the master's HTTP server, which lists pages for `sylvan cache`.
    """

    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    segment: str = "0"
    buffer: str = "128MiB"
    admin: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL."""

    master: str
    port: int
    prefix: str
    options: Options

    @property
    def admin(self) -> tuple[str, int]:
        """Address of the master's HTTP server."""
        host, _, port = self.options.admin.rpartition(":")
        return (host or self.master, int(port)) if self.options.admin else (self.master, ADMIN_PORT)


class MooncakeStore:
    """Implements `PageStore`; `client` is an initialised `MooncakeDistributedStore`."""

    def __init__(self, client: Any, address: Address, timeout_s: float) -> None:
        self._client, self._address, self._timeout_s = client, address, timeout_s
        self._prefix = f"{address.prefix}/"
        self._manifest = f"{self._prefix}manifest"

    def read_manifest(self) -> bytes | None:
        return self._get(self._manifest)

    def write_manifest(self, manifest: bytes) -> bytes:
        """Bind the store: the first value stays."""
        self._check("write", self._client.put(self._manifest, manifest))
        return self.read_manifest() or manifest

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        if not names:
            return []
        found = self._client.batch_is_exist([self._prefix + name for name in names])
        if (failed := min(found)) < 0:
            self._check("ask", failed)
        return [each == 1 for each in found]

    def read(self, name: str) -> bytes | None:
        return self._get(self._prefix + name)

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        return spread(self.read(name), parts)

    def write(self, name: str, record: bytes) -> None:
        self._check("write", self._client.upsert(self._prefix + name, record))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._remove(self._prefix + name)

    def pages(self) -> Iterator[StoredPage]:
        """List the pages, from the master's HTTP server."""
        for key in self._keys():
            name = key.removeprefix(self._prefix)
            if name != key and is_name(name):
                size = int(self._client.get_size(key))
                if size >= 0:
                    yield StoredPage(name, size)

    def sweep(self) -> int:
        """Do nothing: the master does it."""
        return 0

    def clear(self) -> None:
        self._check("clear", self._client.remove_by_regex(f"^{re.escape(self._prefix)}", True))

    def close(self) -> None:
        """See `PageStore.close`; skip the goodbye if the master hangs.

        The package holds the GIL until the master has answered.
        """
        asking = threading.Thread(target=lambda: self._client.is_exist(self._manifest), daemon=True)
        asking.start()
        asking.join(self._timeout_s)
        if not asking.is_alive():
            self._client.close()

    def _get(self, key: str) -> bytes | None:
        record = bytes(self._client.get(key))
        if record:
            return record
        there = self._client.is_exist(key)  # an empty answer has several causes
        self._check("read", min(there, 0))
        return None

    def _remove(self, key: str) -> None:
        code = self._client.remove(key, True)
        if code != _NOT_FOUND:
            self._check("remove", code)

    def _check(self, what: str, code: int) -> None:
        if code >= 0:
            return
        why = "it has no room" if code == _NO_ROOM else f"its error is {code}"
        if self._client.health_check():
            why = f"its master at {self._address.master}:{self._address.port} does not answer"
        raise StoreError(f"the Mooncake store cannot {what}: {why}")

    def _keys(self) -> list[str]:
        host, port = self._address.admin
        connection = HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            connection.request("GET", "/get_all_keys")
            reply = connection.getresponse()
            text = reply.read(_LARGEST_LIST).decode()
        except (OSError, HTTPException, UnicodeDecodeError) as error:
            raise StoreError(
                f"the Mooncake master's HTTP server at {host}:{port} cannot be asked for its pages:"
                f" {error}; name it: mooncake://...?admin=HOST:PORT (its -metrics_port)"
            ) from error
        finally:
            connection.close()
        if reply.status != 200:
            raise StoreError(f"the Mooncake master at {host}:{port} answers {reply.status}")
        return text.split()


def address_of(url: str) -> Address:
    """Parse a URL.

    Raises:
        ConfigError: It names no master, or has an unknown option.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        port = 0
    if not parts.hostname or not port:
        raise ConfigError(f"tiers.storage={url}: a store of Mooncake is mooncake://MASTER:PORT")
    given, known = dict(parse_qsl(parts.query)), [field.name for field in fields(Options)]
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            f"tiers.storage={url}: there is no option {unknown[0]!r}; there is {', '.join(known)}"
        )
    options = Options(**given)
    for name in ("segment", "buffer"):
        if parse_size(getattr(options, name)) is None:
            raise ConfigError(f"tiers.storage={url}: {name} is a size, such as 4GiB")
    if options.protocol not in ("tcp", "rdma"):
        raise ConfigError(f"tiers.storage={url}: protocol is tcp or rdma")
    if options.admin and not options.admin.rpartition(":")[2].isdigit():
        raise ConfigError(f"tiers.storage={url}: admin is HOST:PORT")
    return Address(parts.hostname, port, parts.path.strip("/") or "sylvan", options)


def _check(url: str, limits: StoreLimits) -> None:
    address_of(url)
    if limits.max_bytes is not None or limits.space_bytes is not None or limits.ttl_s is not None:
        raise ConfigError(
            "tiers.max_bytes, tiers.namespace_bytes and tiers.ttl_s are not for Mooncake: its "
            "master evicts what was not used for longest (-eviction_high_watermark_ratio)"
        )
    _module(url)


def _module(url: str) -> Any:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise ConfigError(
            f"tiers.storage={url} needs another package ({error}): pip install "
            "mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda without CUDA; and "
            "libibverbs1 of the system"
        ) from None


def _open(url: str, limits: StoreLimits) -> MooncakeStore:
    _check(url, limits)
    address, client = address_of(url), _module(url).MooncakeDistributedStore()
    options, where = address.options, f"{address.master}:{address.port}"
    own = _own_address(address, limits.timeout_s)
    metadata, protocol, devices = options.metadata, options.protocol, options.devices
    _probe([own, metadata, 0, 16 << 20, protocol, devices, where], limits.timeout_s)
    sizes = parse_size(options.segment), parse_size(options.buffer)
    code = client.setup(options.host or own, metadata, *sizes, protocol, devices, where)
    if code:
        raise StoreError(f"the Mooncake store at {where} cannot be joined: error {code}")
    return MooncakeStore(client, address, limits.timeout_s)


def _probe(arguments: Sequence[object], timeout_s: float) -> None:
    """Join the store from another process first: a hanging master would block this one."""
    command = [sys.executable, "-c", _PROBE, json.dumps(arguments)]
    try:
        subprocess.run(command, capture_output=True, timeout=_JOIN_S + timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise StoreError(
            f"the Mooncake master at {arguments[-1]} does not answer within {error.timeout} s"
        ) from error


def _own_address(address: Address, timeout_s: float) -> str:
    """Return the local address from which the master is reached; fails fast if it is not."""
    where = address.master, address.port
    try:
        with socket.create_connection(where, timeout_s) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise StoreError(
            f"the Mooncake master at {address.master}:{address.port} cannot be reached: {error}"
        ) from error


STORE = StoreKind(open=_open, check=_check)
