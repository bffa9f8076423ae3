"""`sylvan serve --dp N`: several servers of one model behind a gateway."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sylvan.cli.banner import address, greeting
from sylvan.cli.loop import fast_loop
from sylvan.cli.main import DONE
from sylvan.cli.progress import loading
from sylvan.cli.replicas import ReplicaKeys, Replicas, ReservedPort, replica_specs
from sylvan.cli.roles import Roles, paired, with_roles
from sylvan.cli.service import Service, no_reload, on_hangup
from sylvan.cli.settings import Settings
from sylvan.config.env import runtime_dir
from sylvan.config.load import Setting
from sylvan.config.route import RouteConfig
from sylvan.config.route_check import check_route
from sylvan.config.schema import ROUTE
from sylvan.config.sources import SourceSettings, gather_as
from sylvan.config.tree import ServerConfig
from sylvan.config.values import Secret
from sylvan.protocol.errors import ConfigError
from sylvan.utils.clock import monotonic

logger = logging.getLogger(__name__)

START_INTERVAL_S = 0.2
"""Seconds between connection attempts to a local server that is starting."""
_FRONT = ("server", "workers")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Gateway options on the command line: a configuration file, and a policy."""

    file: str | None = None
    policy: str | None = None


def serve_replicas(
    settings: Settings,
    sock: socket.socket | None,
    options: RouterOptions,
    roles: Roles | None = None,
    *,
    quiet: bool,
    until_eof: bool,
) -> int:
    """Start the servers and their gateway, and serve until stopped; return the exit code.

    Args:
        settings: Settings of the servers; the gateway listens at `server`'s address.
        sock: Listening socket; None with `server.uds`.
        options: Gateway options on the command line.
        roles: Number of prefill and decode servers; None: no disaggregation.
        quiet: Print nothing.
        until_eof: Stop when stdin ends.

    Raises:
        ConfigError: A setting is unusable, or a server does not start.
    """
    job = _ReplicatedRun(settings, sock, options, roles, monotonic(), quiet, until_eof)
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(job.run())
    return DONE


@dataclass(frozen=True, slots=True)
class _ReplicatedRun:
    settings: Settings
    sock: socket.socket | None
    options: RouterOptions
    roles: Roles | None
    started_s: float
    quiet: bool
    until_eof: bool

    async def run(self) -> None:
        """Start, serve until stopped, drain, stop the servers."""
        from sylvan.cli.http import StopSignal
        from sylvan.cli.route import Sockets, serve_gateway
        from sylvan.gateway.build import GatewayRuntime

        given = self.settings.loaded.config
        drain_s = given.server.drain_s
        async with AsyncExitStack() as stack:
            stop = stack.enter_context(StopSignal(at_eof=self.until_eof))
            folder = tempfile.TemporaryDirectory(prefix="sylvan-", dir=runtime_dir())
            path = Path(stack.enter_context(folder))
            ports = [ReservedPort() for _ in range(given.server.replicas)]
            for port in ports:
                stack.callback(port.close)
            keys = ReplicaKeys.drawn()
            numbers = [port.number for port in ports]
            specs = replica_specs(given, self.settings.resolved, keys, numbers)
            config = gateway_config(given.server, keys, [s.url for s in specs], self.options)
            if self.roles is not None:
                specs = with_roles(specs, self.roles, path)
                config = paired(config, specs)
            sockets = Sockets.with_metrics(self.sock, config.observe)
            gateway = GatewayRuntime(config)
            replicas = Replicas(specs, path, gateway.suspect, drain_s)
            stop.before_exit(replicas.kill)
            await stack.enter_async_context(replicas)
            await stack.enter_async_context(gateway)
            with loading(f"starting {len(specs)} servers of {given.model}"):
                starting = replicas.ready(lambda: gateway.num_healthy == len(specs))
                if not await stop.unless_stopped(starting):
                    return
            port = await stack.enter_async_context(serve_gateway(gateway, config, sockets))
            self._greet(port, len(specs))
            service = Service.from_environment()
            service.ready()
            with on_hangup(no_reload):
                await stop.wait()
            service.stopping()
            logger.info("stopping: running requests may take %g s", drain_s)
            await gateway.drain(drain_s)

    def _greet(self, port: int, count: int) -> None:
        config = self.settings.resolved.config
        seconds = monotonic() - self.started_s
        logger.info("%d servers ready after %.1f s", count, seconds)
        if not self.quiet:
            name = config.served_model_name or Path(config.model).name
            text = greeting(config, name, address(config.server, port), seconds, replicas=count)
            print(f"\n{text}\n", flush=True)


def gateway_config(
    server: ServerConfig, keys: ReplicaKeys, urls: list[str], options: RouterOptions
) -> RouteConfig:
    """Return the gateway's configuration.

    It listens where a server would; its other settings come from `SYLVAN_ROUTE_...` and the
    file. It serves metrics only if configured to.

    Raises:
        ConfigError: A setting is malformed, or conflicts with the server's settings.
    """
    flags: list[Setting] = []
    if options.policy is not None:
        flags.append(Setting("routing.policy", options.policy, "flag", "--router-policy"))
    loaded = gather_as(ROUTE, SourceSettings(tuple(flags)), file=options.file)
    for path, setting in loaded.given.items():
        section, _, _ = path.partition(".")
        if section in _FRONT or path == "processes":
            raise ConfigError(f"{setting.spelled}: with --dp it comes from the server's settings")
    check_route(loaded)
    config = loaded.config
    front = msgspec.structs.replace(
        config.server,
        host=server.host,
        port=server.port,
        uds=server.uds,
        api_key=server.api_key,
        api_key_file=server.api_key_file,
        cors_origins=server.cors_origins,
        trusted_proxies=server.trusted_proxies,
        max_body_bytes=server.max_body_bytes,
        drain_s=server.drain_s,
        access_log=server.access_log,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
        ssl_keyfile_password=server.ssl_keyfile_password,
        ssl_ca_certs=server.ssl_ca_certs,
    )
    workers = msgspec.structs.replace(
        config.workers,
        urls=tuple(urls),
        api_key=Secret(keys.client),
        gateway_key=Secret(keys.gateway),
        startup_interval_s=START_INTERVAL_S,
    )
    control, observe = config.control, config.observe
    if server.admin_api_key is not None:
        key = Secret(f"admin:admin:admin:{server.admin_api_key.reveal()}")
        control = msgspec.structs.replace(control, api_keys=(*control.api_keys, key))
    if "observe.metrics_port" not in loaded.given:
        observe = msgspec.structs.replace(observe, metrics_port=None)
    return msgspec.structs.replace(
        config, server=front, workers=workers, control=control, observe=observe
    )
