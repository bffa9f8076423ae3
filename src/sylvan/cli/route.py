"""`sylvan route`: a gateway in front of many servers; `sylvan route status` shows them."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import make_asgi_app

from sylvan.cli.banner import address
from sylvan.cli.help import route_markdown
from sylvan.cli.http import HttpServer, StopSignal
from sylvan.cli.listen import bind, listen
from sylvan.cli.loop import fast_loop
from sylvan.cli.main import DONE, Spec
from sylvan.cli.service import Service, reloaded_by_signal
from sylvan.cli.settings import CLIENT_OPTIONS
from sylvan.config.env import config_file
from sylvan.config.flags import Option, Parsed
from sylvan.config.live import LiveSettings
from sylvan.config.load import LoadedConfig
from sylvan.config.route import FrontConfig, MeasureConfig, RouteConfig, RouteLimitsConfig
from sylvan.config.route_check import check_route
from sylvan.config.schema import ROUTE
from sylvan.config.sources import gather_as
from sylvan.gateway.build import GatewayRuntime, PeerIdentity
from sylvan.gateway.live import LIVE
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.connections import ConnectionLimits, Connections
from sylvan.utils import logs
from sylvan.utils.clock import unix_time
from sylvan.utils.loop_watch import DEFAULT_LIMIT_S, LoopWatch

STATUS = "status"
SPEC = Spec(
    usage="route [status] [flags]",
    doc="Put one address in front of many servers: each request goes to a server with a low load "
    "that has cached most of its prompt, and survives the loss of a server. `status` shows the "
    "servers of a running gateway (--url, --key).",
    options=(
        *CLIENT_OPTIONS,
        Option("until_eof", "Stop when standard input ends: for programs that start a gateway."),
        Option("share_port", "Let other processes listen on the port, too; set by `processes`."),
        Option(
            "peer", "Run as one of several processes; set by `processes`.", metavar="FOLDER:NUMBER"
        ),
        Option("quiet", "Print nothing but warnings and errors."),
        Option("markdown", "Print the reference of all settings."),
        Option("json", "With status: print JSON."),
    ),
    tree=ROUTE,
)

logger = logging.getLogger(__name__)


def run(args: Parsed) -> int:
    if args.has("markdown"):
        print(route_markdown(), end="")
        return DONE
    if args.positions:
        return _status(args)
    loaded = load_route(args)
    config = loaded.config
    quiet = args.has("quiet")
    observe = config.observe
    level = "warning" if quiet else observe.log_level
    logs.set_up(level, observe.log_format, folder=observe.log_dir)
    for note in loaded.notes:
        logger.warning("%s", note)
    peers = _peers(args.options.get("peer"), config.processes)
    if config.processes > 1 and peers is None:
        return _many(config, quiet, until_eof=args.has("until_eof"))
    sockets = Sockets.bind_all(config, share=args.has("share_port"))
    eof = args.has("until_eof")
    job = _GatewayRun(config, sockets, quiet, eof, peers, lambda: load_route(args).config)
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(job.run())
    return DONE


def _many(config: RouteConfig, quiet: bool, *, until_eof: bool) -> int:
    from sylvan.cli.route_processes import GatewayProcesses

    processes = GatewayProcesses(config)
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(processes.run(lambda port: _greet(config, port, quiet), until_eof=until_eof))
    return DONE


def _peers(given: str | None, count: int) -> PeerIdentity | None:
    if given is None:
        return None
    folder, _, number = given.rpartition(":")
    if not folder or not number.isdigit() or int(number) >= count:
        raise ConfigError(f"--peer: expected FOLDER:NUMBER, got {given!r}")
    return PeerIdentity(Path(folder), int(number), count)


def load_route(args: Parsed) -> LoadedConfig[RouteConfig]:
    """Read all configuration sources.

    Raises:
        ConfigError: A setting is unknown, malformed or contradictory.
    """
    file = args.options.get("config") or config_file()
    loaded = gather_as(ROUTE, args.given, file=file)
    check_route(loaded)
    return loaded


@dataclass(frozen=True, slots=True)
class Sockets:
    """Bound before anything starts. `front` is None with `server.uds`, `metrics` if disabled."""

    front: socket.socket | None
    metrics: socket.socket | None

    @classmethod
    def bind_all(cls, config: RouteConfig, *, share: bool = False) -> Sockets:
        """Bind all addresses; with `share`, other processes may use the client port too.

        Raises:
            ConfigError: An address cannot be used; the message names alternatives.
        """
        return cls.with_metrics(bind(config.server, share=share), config.observe)

    @classmethod
    def with_metrics(cls, front: socket.socket | None, observe: MeasureConfig) -> Sockets:
        """Also bind the metrics address.

        Raises:
            ConfigError: As in `bind_all`.
        """
        host, port = observe.metrics_host, observe.metrics_port
        if port is None:
            return cls(front, None)
        names = "observe.metrics_host", "observe.metrics_port"
        return cls(front, listen(host, port, names, "--observe.metrics-port"))


@dataclass(frozen=True, slots=True)
class _GatewayRun:
    config: RouteConfig
    sockets: Sockets
    quiet: bool
    until_eof: bool
    peers: PeerIdentity | None
    reread: Callable[[], RouteConfig]

    async def run(self) -> None:
        """Serve until stopped, drain, close."""
        config, peers = self.config, self.peers
        async with AsyncExitStack() as stack:
            stop = stack.enter_context(StopSignal(at_eof=self.until_eof))
            live = LiveSettings(ROUTE, config, LIVE, self.reread, unix_time)
            changes = live if peers is None else None  # one of several has only its part
            runtime = GatewayRuntime(config, peers=peers, live=changes)
            gateway = await stack.enter_async_context(runtime)
            front = serve_gateway(gateway, config, self.sockets, live)
            port = await stack.enter_async_context(front)
            if peers is not None:
                (peers.folder / f"ready-{peers.number}").touch()
            _greet(config, port, self.quiet)
            watch = LoopWatch(DEFAULT_LIMIT_S, lambda stall: logger.warning("%s", stall))
            watch.begin(asyncio.get_running_loop())
            stack.callback(watch.end)
            service = Service.from_environment()
            service.ready()
            with reloaded_by_signal(live, service):
                await stop.wait()
            service.stopping()
            drain_s = live.now.server.drain_s
            logger.info("stopping: running requests may take %g s", drain_s)
            await gateway.drain(drain_s)


def _greet(config: RouteConfig, port: int, quiet: bool) -> None:
    if not quiet:
        print(_greeting(config, port), flush=True)


@asynccontextmanager
async def serve_gateway(
    gateway: GatewayRuntime,
    config: RouteConfig,
    sockets: Sockets,
    live: LiveSettings[RouteConfig] | None = None,
) -> AsyncGenerator[int]:
    """Serve a gateway and its metrics on these sockets; yields the port, 0 for a Unix socket.

    Limits of client connections change with `live`.
    """
    limits = connection_limits(config.limits)
    async with AsyncExitStack() as stack:
        if sockets.metrics is not None:
            metrics = make_asgi_app(gateway.metrics.registry)
            scrapers = Connections(limits)
            server = HttpServer(metrics, FrontConfig(), sockets.metrics, scrapers)
            await stack.enter_async_context(server)
        clients = Connections(limits)
        if live is not None:
            live.add(lambda config: functools.partial(_bound, clients, config.limits))
        http = HttpServer(gateway.app, config.server, sockets.front, clients)
        yield (await stack.enter_async_context(http)).port


def _bound(clients: Connections, limits: RouteLimitsConfig) -> None:
    clients.limits = connection_limits(limits)


def connection_limits(limits: RouteLimitsConfig) -> ConnectionLimits:
    """Return the limits of client connections: configured, and capped by file descriptors."""
    asked = ConnectionLimits(
        total=limits.connections,
        per_address=limits.connections_per_address,
        head_bytes=limits.head_bytes,
        head_s=limits.head_s,
        body_s=limits.body_s,
        write_s=limits.slow_client_s,
    )
    return asked.within_files()


def _greeting(config: RouteConfig, port: int) -> str:
    workers = config.workers
    count = len(workers.urls) + len(workers.prefill_urls) + len(workers.decode_urls)
    where = f"unix:{config.server.uds}" if config.server.uds else address(config.server, port)
    servers = "1 server" if count == 1 else f"{count} servers"
    return f"Sylvan routes to {servers} at {where} ({config.routing.policy})"


def _status(args: Parsed) -> int:
    if args.positions != [STATUS]:
        raise ConfigError(f"expected status, got {args.positions[0]!r}; usage: {SPEC.usage}")
    from sylvan.cli.route_status import show

    config = load_route(args).config
    url = args.options.get("url") or address(config.server, config.server.port)
    return show(url, args.options.get("key"), as_json=args.has("json"))
