"""Parses HOST:PORT addresses of machines."""

from __future__ import annotations

import ipaddress
import socket

from sylvan.protocol.errors import ConfigError

_MOST = 65535
_PROBE_PORT = 9  # no packet is sent


def split_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `[IPV6]:PORT` into host and port.

    Raises:
        ValueError: it has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= _MOST:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return host, int(port)


def resolve_host(host: str) -> str:
    """The IPv4 address of a host.

    Raises:
        ConfigError: it cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"parallel.address: {host!r} is unknown ({error.strerror}); give an IPv4 address of "
            "machine 0, or a name that has one"
        ) from None
    return str(found[0][4][0])


def own_address(peer: str) -> str:
    """The address of this machine as seen by the machine at `peer`."""
    if ipaddress.ip_address(peer).is_loopback:
        return peer
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((peer, _PROBE_PORT))
        return str(sock.getsockname()[0])
