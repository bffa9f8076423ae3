"""`sylvan serve`: starts the runtime, and serves it over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from sylvan.cli.banner import address, decisions_text, greeting
from sylvan.cli.encoder import serve_encoder
from sylvan.cli.listen import bind
from sylvan.cli.loop import fast_loop
from sylvan.cli.main import DONE, Spec
from sylvan.cli.node import serve_node, with_torchrun_settings
from sylvan.cli.progress import starting
from sylvan.cli.ray_nodes import place_nodes
from sylvan.cli.replicated import RouterOptions, serve_replicas
from sylvan.cli.roles import Roles, read_roles
from sylvan.cli.service import Service, reloaded_by_signal
from sylvan.cli.settings import Settings, load_settings, resolve_settings
from sylvan.config.flags import Option, Parsed
from sylvan.config.live import LiveSettings
from sylvan.config.load import LoadedConfig, dump
from sylvan.config.load_cache import may_hold_program
from sylvan.config.schema import SERVE
from sylvan.config.tree import Config, ServerConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.process import PrewarmedScheduler
from sylvan.utils import garbage, logs
from sylvan.utils.clock import monotonic, unix_time
from sylvan.utils.loop_watch import LoopWatch
from sylvan.utils.threads import call_in_thread

SPEC = Spec(
    usage="serve [MODEL] [flags]",
    doc="Serve a model over HTTP: the APIs of OpenAI and SGLang. MODEL is a directory in the "
    "Hugging Face layout, a GGUF file, or a URL; without one the built-in model is served.",
    options=(
        Option("until_eof", "Stop when standard input ends: for programs that start a server."),
        Option("quiet", "Print nothing but warnings and errors."),
        Option("share_port", "Let other processes of this user listen on the port, too."),
        Option(
            "pd",
            "Start this many prefill and decode servers behind a gateway: 1:1.",
            metavar="PREFILL:DECODE",
        ),
        Option("router_config", "With --dp or --pd: settings of the gateway.", metavar="FILE"),
        Option("router_policy", "With --dp or --pd: its routing policy.", metavar="NAME"),
    ),
)

logger = logging.getLogger(__name__)

_ROUTER = ("router_config", "router_policy")

_APP_MODULES = (
    "sylvan.runtime.server.app",
    "sylvan.runtime.server.connections",
    "sylvan.runtime.server.live_settings",
    "sylvan.cli.grpc",
)
"""Imports that take a second, done while the scheduler process starts."""


def run(args: Parsed) -> int:
    started_s = monotonic()
    args, roles = read_roles(with_torchrun_settings(args))
    loaded = load_settings(args)
    early = may_hold_program(loaded.config)
    with closing(PrewarmedScheduler(early=early)) as prewarmed, ExitStack() as start:
        start.enter_context(garbage.gc_paused())
        start.callback(garbage.freeze_existing)
        return _run(args, roles, loaded, prewarmed, started_s, start)


def _run(
    args: Parsed,
    roles: Roles | None,
    loaded: LoadedConfig,
    prewarmed: PrewarmedScheduler,
    started_s: float,
    start: ExitStack,
) -> int:
    settings = resolve_settings(loaded)
    config = settings.resolved.config
    if config.processes == "one":
        prewarmed.close()
    quiet = args.has("quiet")
    logs.set_up("warning" if quiet else config.observe.log_level, config.observe.log_format)
    for note in settings.loaded.notes:
        logger.warning("%s", note)
    if config.parallel.node_rank > 0:
        prewarmed.close()
        start.close()
        return serve_node(settings, quiet=quiet, until_eof=args.has("until_eof"))
    if config.server.grpc_port is not None:
        _check_grpc()
    sock = bind(config.server, share=args.has("share_port"))
    if config.media.encoder_only:
        prewarmed.close()
        start.close()
        return serve_encoder(config, sock, quiet=quiet, until_eof=args.has("until_eof"))
    if not quiet:
        print(f"sylvan {Path(config.model).name}\n{decisions_text(settings)}", flush=True)
    if config.server.replicas > 1:
        prewarmed.close()
        if config.disagg is not None and roles is None:
            raise ConfigError("disagg: the servers need roles; use --pd instead of --dp")
        front = RouterOptions(args.options.get("router_config"), args.options.get("router_policy"))
        eof = args.has("until_eof")
        start.close()
        return serve_replicas(settings, sock, front, roles, quiet=quiet, until_eof=eof)
    if unused := [f"--{name.replace('_', '-')}" for name in _ROUTER if args.has(name)]:
        raise ConfigError(f"{unused[0]}: it needs --dp or --pd, which start a gateway")
    with place_nodes(settings) as settings, asyncio.Runner(loop_factory=fast_loop()) as runner:
        eof, service = args.has("until_eof"), Service.from_environment()
        job = ServeJob(
            *(settings, sock, prewarmed, started_s, start, quiet, eof, service),
            reread=lambda: load_settings(args).config,
        )
        runner.run(_serve(job))
    return DONE


@dataclass(frozen=True, slots=True)
class ServeJob:
    """Settings and resources of one server run.

    `sock` is None with `server.uds`. `start` is closed when the server is ready.
    """

    settings: Settings
    sock: socket.socket | None
    prewarmed: PrewarmedScheduler
    started_s: float
    start: ExitStack
    quiet: bool
    until_eof: bool
    service: Service
    reread: Callable[[], Config]


async def _serve(job: ServeJob) -> None:
    """Start, serve until stopped, drain, close."""
    from sylvan.cli.http import HttpServer, StopSignal
    from sylvan.runtime.engine.runtime import Runtime

    config = job.settings.resolved.config
    with StopSignal(at_eof=job.until_eof) as stop:
        with starting(f"loading {config.model}", quiet=job.quiet) as progress:
            starting_up = Runtime.start(
                config, progress=progress, during_start=_import_app, prewarmed=job.prewarmed
            )
            runtime = await stop.unless_stopped(starting_up)
        if runtime is None:
            return
        stop.before_exit(runtime.kill)
        try:
            from sylvan.cli.grpc import grpc_server
            from sylvan.runtime.server.app import app_of
            from sylvan.runtime.server.connections import ConnectionLimits, Connections
            from sylvan.runtime.server.context import make_context
            from sylvan.runtime.server.live_settings import LIVE
            from sylvan.runtime.server.settings import ServerSettings

            settings = ServerSettings.from_config(config, shown=dump(config))
            connections = Connections(ConnectionLimits.from_config(config.limits))
            live = LiveSettings(SERVE, job.settings.loaded.config, LIVE, job.reread, unix_time)
            context = make_context(runtime.manager, settings, live=live, connections=connections)
            context.accounts.show_connections(connections)
            http = HttpServer(app_of(context), config.server, job.sock, connections)
            watch = LoopWatch(config.observe.loop_hold_s, context.accounts.loop_stalled)
            watch.begin(asyncio.get_running_loop())
            async with http, grpc_server(context, config.server) as grpc_port:
                context.accounts.started(monotonic() - job.started_s)
                job.start.close()
                _greet(job, http.port, grpc_port)
                url = address(config.server, http.port)
                async with _registered(config.server, url):
                    await _until(stop.wait(), live, job.service)
                await runtime.drain(live.now.server.drain_s)
            watch.end()
            await context.observing.close()
        finally:
            await runtime.close()


def _registered(server: ServerConfig, url: str) -> AbstractAsyncContextManager[object]:
    """Keep the server registered with its gateways, if it has some."""
    if not server.register:
        return nullcontext()
    from sylvan.runtime.server.registration import Registration, RegistrationInfo

    return Registration(RegistrationInfo.from_config(server, url))


async def _until(stopped: Awaitable[None], live: LiveSettings[Config], service: Service) -> None:
    """Apply changes of settings until stopped."""
    service.ready()
    with reloaded_by_signal(live, service):
        await stopped
    service.stopping()
    logger.info("stopping: running requests may take %g s", live.now.server.drain_s)


def _check_grpc() -> None:
    for name in ("grpc", "grpc_reflection", "grpc_health"):
        if importlib.util.find_spec(name) is None:
            message = f"server.grpc_port: {name} is not installed: pip install 'sylvan[grpc]'"
            raise ConfigError(message)


async def _import_app() -> None:
    for module in _APP_MODULES:
        await call_in_thread(importlib.import_module, module)


def _greet(job: ServeJob, port: int, grpc_port: int | None) -> None:
    config = job.settings.resolved.config
    seconds = monotonic() - job.started_s
    logger.info("ready after %.1f s", seconds)
    if not job.quiet:
        name = config.served_model_name or Path(config.model).name
        text = greeting(config, name, address(config.server, port), seconds)
        if grpc_port is not None:
            text += f"\n  gRPC: {config.server.host}:{grpc_port}"
        print(f"\n{text}\n", flush=True)
