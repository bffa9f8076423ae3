"""Integration with systemd: socket activation and status notifications."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from sylvan.config.env import given_sockets, notify_address
from sylvan.config.live import LiveSettings
from sylvan.protocol.errors import ConfigError
from sylvan.utils.clock import monotonic

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """Notifies the service manager of this process's state; does nothing without one.

    Attributes:
        address: The manager's socket; a leading `@` means an abstract socket.
    """

    address: str | None

    @classmethod
    def from_environment(cls) -> Service:
        """Return the manager that started this process, if any."""
        return cls(notify_address())

    def ready(self) -> None:
        """Requests are served from now on, or again after `reloading`."""
        self._say("READY=1")

    def reloading(self) -> None:
        """Settings are being reloaded."""
        self._say(f"RELOADING=1\nMONOTONIC_USEC={int(monotonic() * 1e6)}")

    def stopping(self) -> None:
        """The process is draining."""
        self._say("STOPPING=1")

    def _say(self, text: str) -> None:
        if not self.address:
            return
        path = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            try:
                sock.sendto(text.encode(), path)
            except OSError:
                return  # the manager is gone


@contextmanager
def on_hangup(do: Callable[[], None]) -> Iterator[None]:
    """Run a callback on SIGHUP, on a running event loop.

    With a controlling terminal, the signal means that it closed, and exits as by default.
    """
    if sys.stdin is not None and sys.stdin.isatty():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, do)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def no_reload() -> None:
    """Reject SIGHUP: several processes share the settings."""
    logger.warning("SIGHUP: with several processes, settings need a restart; nothing changed")


def reloaded_by_signal(live: LiveSettings[Any], service: Service) -> AbstractContextManager[None]:
    """Reload all settings on SIGHUP."""

    def reread() -> None:
        service.reloading()
        try:
            entry = live.reread("SIGHUP")
        except ConfigError as error:
            logger.warning("SIGHUP: nothing has changed: %s", error)
        else:
            changed = ", ".join(change.path for change in entry.changes) or "no setting"
            logger.info("SIGHUP: keys reloaded; %s changed", changed)
            if entry.restart:
                logger.warning("SIGHUP: these need a restart: %s", ", ".join(entry.restart))
        service.ready()

    return on_hangup(reread)


def inherited_socket(host: str, port: int) -> socket.socket | None:
    """Return the listening socket passed to this process (`LISTEN_FDS`), if any.

    Args:
        host: Configured address; must match, because access control depends on it.
        port: Configured port; must match; 0: any.

    Raises:
        ConfigError: There are several, or it is not a TCP socket listening there.
    """
    files = given_sockets()
    if not files:
        return None
    if len(files) > 1:
        raise ConfigError(f"LISTEN_FDS: expected one socket, got {len(files)}")
    os.set_inheritable(files[0], False)  # child processes must not inherit it
    try:
        sock = socket.socket(fileno=files[0])
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: file descriptor {files[0]}: {error.strerror}") from error
    inet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not (listens and inet):
        raise ConfigError(f"LISTEN_FDS: file descriptor {files[0]} is not a listening TCP socket")
    there = sock.getsockname()
    wanted = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    if there[0] != wanted[0] or port not in (0, there[1]):
        raise ConfigError(
            f"server.host, server.port: they set {host}:{port}, but the socket that the service "
            f"manager opened listens on {there[0]}:{there[1]}; make both the same"
        )
    return sock
