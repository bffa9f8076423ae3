"""Discovers workers from the addresses of a DNS name: headless services, round-robin records."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import urlsplit

import msgspec

from sylvan.gateway.discovery.api import DiscoveryError
from sylvan.gateway.workers.spec import WorkerSpec, normal_url
from sylvan.protocol.errors import ConfigError

TIMEOUT_S = 10.0


class DnsSource:
    """The addresses of a DNS name.

    A name that does not resolve counts as a failure of the resolver, not as the removal of all
    workers.

    Args:
        target: `NAME:PORT`, with `http://` (the default) or `grpc://` before it.
        template: Settings common to all workers.

    Raises:
        ConfigError: The target is malformed.
    """

    name: ClassVar[str] = "dns"

    def __init__(self, target: str, template: WorkerSpec) -> None:
        text = target if "://" in target else f"http://{target}"
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"discovery.dns: {target!r}: {error}") from error
        if parts.scheme not in ("http", "grpc"):
            message = f"discovery.dns: {target!r}: addresses have no certificates; use http or grpc"
            raise ConfigError(message)
        if not host or port is None or parts.path.strip("/") or parts.query:
            raise ConfigError(f"discovery.dns: expected NAME:PORT, got {target!r}")
        self._scheme, self._host, self._port = parts.scheme, host, port
        self._template = template
        self._last: frozenset[str] | None = None

    async def list_workers(self) -> Sequence[WorkerSpec] | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            raise DiscoveryError(f"{self._host} was not resolved in {TIMEOUT_S:g} s") from error
        except OSError as error:
            raise DiscoveryError(f"{self._host} does not resolve: {error}") from error
        urls = frozenset(self._url(str(address[0])) for *_, address in found)
        if urls == self._last:
            return None
        self._last = urls
        return [msgspec.structs.replace(self._template, url=url) for url in sorted(urls)]

    def _url(self, host: str) -> str:
        shown = f"[{host}]" if ":" in host else host
        return normal_url(f"{self._scheme}://{shown}:{self._port}")
