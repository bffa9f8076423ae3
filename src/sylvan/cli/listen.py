"""Binds the listening socket, before anything slow starts."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Protocol

from sylvan.cli.service import inherited_socket
from sylvan.protocol.errors import ConfigError

_BACKLOG = 2048
_PORTS_TRIED = 100


class Listening(Protocol):
    """Listening address: a section of a configuration."""

    @property
    def host(self) -> str:
        """Address."""
        ...

    @property
    def port(self) -> int:
        """Port; 0 takes a free one."""
        ...

    @property
    def uds(self) -> str | None:
        """Unix socket, instead of host and port."""
        ...


def bind(server: Listening, *, share: bool = False) -> socket.socket | None:
    """Bind host and port; None with `server.uds`, whose path is only cleared.

    A socket passed by a service manager is used as it is.

    Args:
        server: The address.
        share: Other processes of this user that opt in may use the port too (SO_REUSEPORT).

    Raises:
        ConfigError: The address cannot be used; the message names alternatives.
    """
    if server.uds is not None:
        _free_path(Path(server.uds))
        return None
    if (given := inherited_socket(server.host, server.port)) is not None:
        return given
    names = "server.host", "server.port"
    return listen(server.host, server.port, names, "--port", share=share)


def listen(
    host: str, port: int, names: tuple[str, str], flag: str, *, share: bool = False
) -> socket.socket:
    """Listen on an address.

    Args:
        host: Local address.
        port: 0: any free port.
        names: Names of the two settings, for messages.
        flag: Flag that sets the port.
        share: As in `bind`.

    Raises:
        ConfigError: The address cannot be used; the message names alternatives.
    """
    try:
        return _listen(host, port, share=share)
    except socket.gaierror as error:
        raise ConfigError(f"{names[0]}: {host!r} is not an address of this machine") from error
    except OSError as error:
        raise ConfigError(_explain((host, port), names, flag, error)) from error


def reserve(server: Listening) -> socket.socket:
    """Reserve a port for processes that share it. They listen on it; this socket never does.

    Raises:
        ConfigError: The address cannot be used; the message names alternatives.
    """
    names = "server.host", "server.port"
    listen(server.host, server.port, names, "--port").close()  # fails if others share the port
    family = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0][0]
    made = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # like those that listen
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((server.host, server.port))
    return made


def free_port(host: str, after: int) -> int | None:
    """Return the next free port above `after`."""
    for port in range(after + 1, min(after + 1 + _PORTS_TRIED, 65536)):
        try:
            _listen(host, port).close()
        except OSError:
            continue
        return port
    return None


def _listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=share)


def _explain(address: tuple[str, int], names: tuple[str, str], flag: str, error: OSError) -> str:
    host, port = address
    host_name, port_name = names
    match error.errno:
        case errno.EADDRINUSE:
            free = free_port(host, port)
            way = f"port {free} is free: {flag} {free}" if free else f"{flag} 0 takes a free one"
            return f"{port_name}: port {port} of {host} is taken; {way}"
        case errno.EACCES:
            return f"{port_name}: port {port} needs administrator rights; use one above 1023"
        case errno.EADDRNOTAVAIL:
            return f"{host_name}: {host!r} is not an address of this machine; 0.0.0.0 means all"
        case _:
            return f"cannot listen on {host}:{port}: {error.strerror}"


def _free_path(path: Path) -> None:
    """Delete a socket left by a dead server; refuse to delete anything else."""
    if not path.parent.is_dir():
        raise ConfigError(f"server.uds: there is no directory {str(path.parent)!r}")
    if len(os.fsencode(path)) > 100:
        raise ConfigError(f"server.uds: {str(path)!r} is too long for a socket; 100 bytes at most")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"server.uds: {str(path)!r} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"server.uds: another server listens on {str(path)!r}")
