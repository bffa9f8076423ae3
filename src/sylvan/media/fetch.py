"""Items by address: bounded in bytes, seconds and redirects, and never from private networks.

The name of a host is looked up once, every address that it has is checked, and the connection goes
to the address that was checked: a name that answers differently the next time gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from sylvan.media.source import MediaSource
from sylvan.protocol.errors import RequestError
from sylvan.utils.threads import call_in_thread

MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """What may be fetched; the names of settings are in errors.

    Attributes:
        fetch: Whether addresses are fetched from at all.
        allowed_hosts: If not empty, the only ones; they may be private.
        allowed_dirs: Directories that files may be read from.
        item_bytes: Of one item.
        fetch_s: For one item.
    """

    fetch: bool = False
    allowed_hosts: Sequence[str] = ()
    allowed_dirs: Sequence[str] = ()
    item_bytes: int = 64 << 20
    fetch_s: float = 10.0


class Fetcher:
    """Gets the bytes of items."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._client: httpx.AsyncClient | None = None

    async def read(self, source: MediaSource) -> bytes:
        """The bytes of an item.

        Raises:
            RequestError: They cannot or may not be had; names the path in the body.
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
        """End all connections."""
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
            # the same words whether it exists or not
            raise RequestError(
                f"{source.path}: this file is not in a directory that files may be read from "
                "(media.allowed_dirs).",
                param=source.path,
            )
        try:
            if not real.is_file():
                raise RequestError(f"{source.path}: this is no file.", param=source.path)
            with real.open("rb") as file:
                return file.read(self._limits.item_bytes + 1)
        except OSError as error:
            message = f"{source.path}: the file cannot be read: {error.strerror}."
            raise RequestError(message, param=source.path) from error

    # ---- addresses

    async def _fetch(self, source: MediaSource) -> bytes:
        if not self._limits.fetch:
            raise RequestError(
                f"{source.path}: this server fetches nothing by address (media.fetch); send the "
                f"{source.kind} as a data URL.",
                param=source.path,
            )
        try:
            async with asyncio.timeout(self._limits.fetch_s):
                return await self._follow(source)
        except TimeoutError as error:
            raise RequestError(
                f"{source.path}: it did not come within {self._limits.fetch_s:g} s "
                "(media.fetch_s).",
                param=source.path,
            ) from error
        except (httpx.HTTPError, OSError) as error:
            kind = type(error).__name__
            message = f"{source.path}: it cannot be fetched ({kind})."
            raise RequestError(message, param=source.path) from error

    async def _follow(self, source: MediaSource) -> bytes:
        url = source.url
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(source, url)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        message = f"{source.path}: more than {MAX_REDIRECTS} redirects."
        raise RequestError(message, param=source.path)

    async def _get(self, source: MediaSource, url: str) -> bytes | str:
        """The body, or where it is instead."""
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
        except ValueError:
            host = port = None
        if not host or port is None or parts.scheme not in _PORTS:
            message = f"{source.path}: this is no http or https address."
            raise RequestError(message, param=source.path)
        address = await self._checked(source, host, port)
        shown = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{shown}:{port}", fragment="").geturl()
        if self._client is None:
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

    async def _bounded(self, source: MediaSource, response: httpx.Response) -> bytes:
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
            if size > self._limits.item_bytes:
                raise self._too_large(source)
            chunks.append(chunk)
        return b"".join(chunks)

    async def _checked(self, source: MediaSource, host: str, port: int) -> str:
        """An address of a host that may be connected to."""
        allowed = self._limits.allowed_hosts
        if allowed and host not in allowed:
            message = f"{source.path}: {host[:80]!r} is not among media.allowed_hosts."
            raise RequestError(message, param=source.path)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            message = f"{source.path}: the host {host[:80]!r} is not known."
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


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is not None:
            found = inner
        elif found in ipaddress.ip_network("64:ff9b::/96"):  # IPv4 behind NAT64
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    return found.is_global and not found.is_multicast
