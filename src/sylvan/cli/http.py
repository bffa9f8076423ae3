"""Runs an ASGI application on the running event loop, and handles stop signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import uvicorn
from starlette.types import ASGIApp

from sylvan.cli.certificates import Certificates, Encryption
from sylvan.cli.main import INTERRUPTED
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.connections import BoundedProtocol, Connections

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CLOSE_S = 5
_POLL_S = 0.01
_TICK_S = 0.1
"""uvicorn counts ticks of this length, for the date in its headers."""


class StopSignal:
    """Set by the first SIGTERM or Ctrl-C; the second one exits at once.

    Args:
        at_eof: Also set it when stdin ends.
    """

    def __init__(self, *, at_eof: bool = False) -> None:
        self._event = asyncio.Event()
        self._at_eof = at_eof
        self._kill: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        if self._at_eof:
            loop.add_reader(sys.stdin.fileno(), self._readable)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if self._at_eof:
            loop.remove_reader(sys.stdin.fileno())

    def before_exit(self, kill: Callable[[], None]) -> None:
        """Set what the second signal does before the exit."""
        self._kill = kill

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._event.wait()

    async def unless_stopped(self, work: Awaitable[T]) -> T | None:
        """Return the result of `work`; None if this was set first and `work` was cancelled."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._event.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        return None if task.cancelled() else task.result()

    def _signalled(self) -> None:
        if self._event.is_set():
            self._kill()
            os._exit(INTERRUPTED)
        self._event.set()

    def _readable(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._at_eof = False
            self._event.set()


class HttpAddress(Encryption, Protocol):
    """Listening address and TLS settings: a section of a configuration."""

    @property
    def uds(self) -> str | None:
        """Unix socket, if it listens on one."""
        ...

    @property
    def ssl_ca_certs(self) -> str | None:
        """CA certificates for client certificates."""
        ...

    @property
    def trusted_proxies(self) -> tuple[str, ...]:
        """Proxies whose forwarding headers are trusted."""
        ...


class HttpServer:
    """An application behind a socket; use it as an async context manager.

    Attributes:
        port: Listening port; 0 for a Unix socket.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: HttpAddress,
        sock: socket.socket | None,
        connections: Connections,
    ) -> None:
        protocol: Any = functools.partial(BoundedProtocol, connections)
        config = uvicorn.Config(
            app,
            http=protocol,
            uds=server.uds,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_CLOSE_S,
            ssl_certfile=server.ssl_certfile,
            ssl_keyfile=server.ssl_keyfile,
            ssl_keyfile_password=(
                server.ssl_keyfile_password.reveal() if server.ssl_keyfile_password else None
            ),
            ssl_ca_certs=server.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if server.ssl_ca_certs else ssl.CERT_NONE,
            server_header=False,
            proxy_headers=bool(server.trusted_proxies),
            forwarded_allow_ips=list(server.trusted_proxies),
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            names = "server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs"
            raise ConfigError(f"{names}: {error}") from error
        self._server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None
        self._certificates = Certificates(config.ssl, server) if config.ssl else None
        self._watch: asyncio.Task[None] | None = None
        self.port: int = sock.getsockname()[1] if sock else 0

    async def __aenter__(self) -> Self:
        sockets = [self._sock] if self._sock else None
        self._task = asyncio.create_task(self._server.serve(sockets))
        while not (self._server.started or self._task.done()):
            await asyncio.sleep(_POLL_S)
        if self._certificates is not None:
            self._watch = asyncio.create_task(self._certificates.watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._server.stop()
        assert self._task is not None, "__aenter__ ran before __aexit__"
        await self._task


class _Server(uvicorn.Server):
    """A server that leaves signals to `StopSignal`, and stops without uvicorn's fixed pauses."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Make `serve` return."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(_CLOSE_S):
                while state.connections or state.tasks:
                    await asyncio.sleep(_POLL_S)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in state.tasks:
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
