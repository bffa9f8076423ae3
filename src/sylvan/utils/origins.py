"""Parses host names, and compares the origin of a web page with the server that it calls."""

from __future__ import annotations

import functools
import ipaddress
import re
from urllib.parse import urlsplit

_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,255}))(?::(?P<port>[0-9]{1,5}))?"
)
_REMEMBERED = 256  # callers know a server by a few names
_SCHEME_PORTS = {"http": 80, "https": 443}


@functools.lru_cache(_REMEMBERED)
def host_of(authority: str) -> str | None:
    """Return the host in `host[:port]`, lower case and without a final dot; None if malformed."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None or int(found["port"] or 0) > 65535:
        return None
    if found["v6"] is None:
        return found["name"].lower().removesuffix(".") or None
    try:
        return str(ipaddress.IPv6Address(found["v6"]))
    except ValueError:
        return None


@functools.lru_cache(_REMEMBERED)
def is_loopback(host: str) -> bool:
    """Whether a host, as `host_of` returns it, is this machine."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def is_own(origin: str, authority: str) -> bool:
    """Whether an origin is the server itself, which was called as `authority`."""
    scheme, separator, rest = origin.partition("://")
    port = _SCHEME_PORTS.get(scheme)
    if not separator or port is None or host_of(rest) is None or host_of(authority) is None:
        return False
    ours, theirs = urlsplit(f"//{authority}"), urlsplit(f"//{rest}")
    same_host = host_of(authority) == host_of(rest)
    return same_host and (ours.port or port) == (theirs.port or port)
