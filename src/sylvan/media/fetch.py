"""Fetches URLs with limits on bytes, time and redirects, and never from private networks.

A host name is resolved once, all its addresses are checked, and the connection uses a checked
address, so a name that resolves differently the next time gains nothing (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from sylvan.media.source import MediaSource
from sylvan.protocol.errors import RequestError
from sylvan.utils.threads import call_in_thread

MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_REFUSED = (
    ipaddress.ip_network("168.63.129.16/32"),  # Azure's host, with credentials of the machine
    ipaddress.ip_network("192.0.0.0/24"),  # IETF; Oracle's metadata service
    ipaddress.ip_network("64:ff9b:1::/48"),  # NAT64 of a local network (RFC 8215)
)
"""Networks that are not private for `ipaddress`."""
_WITH_IPV4 = (
    ipaddress.IPv6Network("64:ff9b::/96"),  # NAT64
    ipaddress.IPv6Network("::/96"),  # IPv4-compatible addresses, and `::1`
)
"""Networks whose IPv6 addresses embed an IPv4 address in the last 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """Limits of fetching; errors name the settings.

    Attributes:
        fetch: Whether URLs are fetched at all.
        allowed_hosts: If not empty, the only allowed hosts; they may be private.
        allowed_dirs: Directories from which files may be read.
        item_bytes: Size of one item.
        fetch_s: Timeout of one item.
    """

    fetch: bool = False
    allowed_hosts: Sequence[str] = ()
    allowed_dirs: Sequence[str] = ()
    item_bytes: int = 64 << 20
    fetch_s: float = 10.0


class Fetcher:
    """Fetches the bytes of items."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._client: Any = None  # httpx.AsyncClient; httpx is imported with the first URL

    async def read(self, source: MediaSource) -> bytes:
        """Return the bytes of an item.

        Raises:
            RequestError: It cannot or may not be fetched; the message names the path in the body.
        """
        if source.data is not None:
            data = source.data
        elif source.url.lower().startswith("file://"):
            data = await call_in_thread(self._read_file, source)
        else:
            data = await self._fetch(source)
        if len(data) > self._limits.item_bytes:
            raise self._too_large(source)
        if not data:
            raise RequestError(f"{source.path}: the {source.kind} is empty.", param=source.path)
        return data

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    # ---- files

    def _read_file(self, source: MediaSource) -> bytes:
        path = Path(unquote(urlsplit(source.url).path))
        try:
            real = path.resolve(strict=True)
        except OSError:
            real = None
        allowed = [Path(folder).resolve() for folder in self._limits.allowed_dirs]
        if real is None or not any(real.is_relative_to(folder) for folder in allowed):
            # the same message whether it exists or not
            raise RequestError(
                f"{source.path}: this file is outside the directories from which files may be read "
                "(media.allowed_dirs).",
                param=source.path,
            )
        try:
            if not real.is_file():
                raise RequestError(f"{source.path}: this is not a file.", param=source.path)
            with real.open("rb") as file:
                return file.read(self._limits.item_bytes + 1)
        except OSError as error:
            message = f"{source.path}: the file cannot be read: {error.strerror}."
            raise RequestError(message, param=source.path) from error

    # ---- URLs

    async def _fetch(self, source: MediaSource) -> bytes:
        if not self._limits.fetch:
            raise RequestError(
                f"{source.path}: this server does not fetch URLs (media.fetch); send the "
                f"{source.kind} as a data URL.",
                param=source.path,
            )
        import httpx

        try:
            async with asyncio.timeout(self._limits.fetch_s):
                return await self._follow(source)
        except TimeoutError as error:
            raise RequestError(
                f"{source.path}: it could not be fetched within {self._limits.fetch_s:g} s "
                "(media.fetch_s).",
                param=source.path,
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            kind = type(error).__name__
            message = f"{source.path}: it cannot be fetched ({kind})."
            raise RequestError(message, param=source.path) from error

    async def _follow(self, source: MediaSource) -> bytes:
        url = source.url
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(source, url)
            if isinstance(found, bytes):
                return found
            url = _joined(url, found)
        message = f"{source.path}: more than {MAX_REDIRECTS} redirects."
        raise RequestError(message, param=source.path)

    async def _get(self, source: MediaSource, url: str) -> bytes | str:
        """Return the body, or the redirect target."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if not host or port is None or parts.scheme not in _PORTS:
            message = f"{source.path}: this is not an http or https URL."
            raise RequestError(message, param=source.path)
        address = await self._checked(source, host, port)
        shown = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{shown}:{port}", fragment="").geturl()
        if self._client is None:
            import httpx

            self._client = httpx.AsyncClient(follow_redirects=False, trust_env=False)
        request = self._client.build_request(
            "GET",
            target,
            headers={"host": parts.netloc.rpartition("@")[2], "accept-encoding": "identity"},
            extensions={"sni_hostname": host},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.is_redirect:
                return response.headers.get("location", "")
            if response.status_code != 200:
                message = f"{source.path}: its server answers {response.status_code}."
                raise RequestError(message, param=source.path)
            return await self._bounded(source, response)
        finally:
            await response.aclose()

    async def _bounded(self, source: MediaSource, response: Any) -> bytes:
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
            if size > self._limits.item_bytes:
                raise self._too_large(source)
            chunks.append(chunk)
        return b"".join(chunks)

    async def _checked(self, source: MediaSource, host: str, port: int) -> str:
        """Return a permitted address of a host."""
        allowed = self._limits.allowed_hosts
        if allowed and host not in allowed:
            message = f"{source.path}: {host[:80]!r} is not among media.allowed_hosts."
            raise RequestError(message, param=source.path)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            message = f"{source.path}: the host name {host[:80]!r} cannot be resolved."
            raise RequestError(message, param=source.path) from error
        addresses = [str(info[4][0]) for info in found]
        if not allowed and not all(_is_public(address) for address in addresses):
            raise RequestError(
                f"{source.path}: {host[:80]!r} is an address of this machine or of a private "
                "network.",
                param=source.path,
            )
        return addresses[0]

    def _too_large(self, source: MediaSource) -> RequestError:
        return RequestError(
            f"{source.path}: the {source.kind} is larger than {self._limits.item_bytes} bytes "
            "(media.item_bytes).",
            param=source.path,
            status=413,
        )


def _joined(url: str, target: str) -> str:
    """Where a redirect leads to; empty if that is not an address."""
    try:
        return urljoin(url, target)
    except ValueError:
        return ""


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is not None:
            found = inner
        elif any(found in network for network in _WITH_IPV4):
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    refused = any(found in network for network in _REFUSED)
    return found.is_global and not found.is_multicast and not refused
