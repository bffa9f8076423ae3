"""Builds a gateway from its configuration; the only module that knows all its parts."""

from __future__ import annotations

import asyncio
import importlib.util
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from sylvan.config.keys import KeyEntry, read_key_file
from sylvan.config.live import LiveSettings
from sylvan.config.load import dump
from sylvan.config.route import ControlConfig, RouteConfig
from sylvan.config.schema import ROUTE
from sylvan.gateway.app import AppParts, Gateway, Serving
from sylvan.gateway.control.api import OwnRoute
from sylvan.gateway.control.gauges import InflightAges, WorkerGauges
from sylvan.gateway.control.information import Information, InformationParts
from sylvan.gateway.control.page import PAGE
from sylvan.gateway.control.settings import SettingsRoutes
from sylvan.gateway.control.texts import TextRoutes
from sylvan.gateway.control.workers import Changed, WorkerRoutes
from sylvan.gateway.discovery.api import WorkerSource
from sylvan.gateway.discovery.dns import DnsSource
from sylvan.gateway.discovery.file import FileSource
from sylvan.gateway.discovery.reconcile import Reconciler
from sylvan.gateway.flow.admission import GatewayAdmission
from sylvan.gateway.flow.retry import RetryBudget
from sylvan.gateway.http.exchange import ExchangeParts
from sylvan.gateway.http.outgoing import Forwarding
from sylvan.gateway.http.router import GrpcServing, HttpRouter, RouterParts
from sylvan.gateway.http.routes import PASSED
from sylvan.gateway.http.sender import RequestSender
from sylvan.gateway.live import GatewayCallerSettings
from sylvan.gateway.observe.metrics import GatewayMetrics
from sylvan.gateway.observe.spans import NoTracing, Tracing
from sylvan.gateway.openai.build import PassThroughBuilder
from sylvan.gateway.openai.router import ROUTES as PROVIDED
from sylvan.gateway.openai.router import PassThrough
from sylvan.gateway.openai.upstreams import Upstreams, read_upstreams
from sylvan.gateway.peers.channel import PeerChannel
from sylvan.gateway.peers.sharing import Sharing, SharingParts
from sylvan.gateway.placement import RequestPlacer
from sylvan.gateway.policies.api import PolicyParts
from sylvan.gateway.prefixes.blocks import BlockIndex
from sylvan.gateway.prefixes.cache_follower import CacheFollower
from sylvan.gateway.security.clients import Clients
from sylvan.gateway.security.gate import GatewayAuth, Tokens
from sylvan.gateway.security.operators import Operators
from sylvan.gateway.security.pages import TrustedPages
from sylvan.gateway.table import RouteTable
from sylvan.gateway.text.library import TextLibrary
from sylvan.gateway.text.prompts import PromptIds
from sylvan.gateway.upstream.http import HttpUpstream
from sylvan.gateway.workers.breaker import BreakerState
from sylvan.gateway.workers.health import HealthChecks
from sylvan.gateway.workers.jobs import JobParts, Jobs
from sylvan.gateway.workers.monitor import LoadMonitor
from sylvan.gateway.workers.probe import HttpProbe
from sylvan.gateway.workers.probes import GrpcProbing, Probes
from sylvan.gateway.workers.recovery import Recovery
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import Kind, WorkerSpec, checked
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.utils.body_memory import BodyMemory
from sylvan.utils.clock import Clock, monotonic
from sylvan.utils.logs import LogLevel

DRAIN_POLL_S = 0.05
PATIENT = 1_000_000
"""Connection attempts to workers named at start-up; their total time is bounded as well."""


def wall_clock() -> float:
    """Return the seconds since the Unix epoch."""
    return datetime.now(tz=UTC).timestamp()


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks: monotonic for durations, wall for timestamps."""

    monotonic: Clock = monotonic
    wall: Clock = wall_clock


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Identifies this process among the processes of one gateway.

    Attributes:
        folder: Private directory with the sockets between the processes.
        number: Index of this process, from 0.
        count: Number of processes.
    """

    folder: Path
    number: int
    count: int


class GatewayRuntime:
    """A gateway on the running event loop; use it as an async context manager.

    Args:
        config: Its configuration.
        clocks: Its clocks.
        peers: This process among the others of the gateway, if there are others.
        live: The settings that operators may change at run time, if any.

    Raises:
        ConfigError: A setting is invalid.

    Attributes:
        app: The ASGI application.
        registry: All workers.
        jobs: Adds and removes workers.
        metrics: Prometheus metrics.
    """

    def __init__(
        self,
        config: RouteConfig,
        clocks: Clocks | None = None,
        peers: PeerIdentity | None = None,
        live: LiveSettings[RouteConfig] | None = None,
    ) -> None:
        self._config = config
        self._peers = peers
        self._worker_changed: Changed = _no_peers
        self._shown = public(config)
        self._clocks = clocks or Clocks()
        self._stack = AsyncExitStack()
        self._draining = False
        self.registry = Registry()
        self.metrics = GatewayMetrics(config.observe.duration_buckets)
        self._traces = traces_of(config)
        self._upstreams = None if config.providers is None else read_upstreams(config)
        self._specs = initial_specs(config) if self._upstreams is None else []
        self._sources = discovery_sources(config)
        self._upstream = HttpUpstream(config.workers)
        self._grpc = grpc_side(config)
        fetch = None if self._grpc is None else self._grpc.tokenizer
        self._library = TextLibrary(config.tokens, fetch)
        clients = Clients(
            config.server.api_key,
            client_keys(config.server.api_key_file),
            self._clocks.monotonic,
        )
        tokens = identity_tokens(config.control, self._upstream, self._clocks.monotonic)
        operators = Operators(config.control.api_keys)
        self._gate = GatewayAuth(config.server, clients, operators, tokens)
        self._admission = GatewayAdmission(config.limits, self._clocks.monotonic)
        self._settings: tuple[OwnRoute, ...] = ()
        if live is not None:
            level = LogLevel(config.observe.log_level)
            live.add(GatewayCallerSettings(clients, operators, self._admission, level))
            self._settings = SettingsRoutes(live).routes
        follows = config.routing.cache_events
        blocks = BlockIndex(config.routing.max_tree_bytes) if follows else None
        self._blocks = blocks
        self._placing = RequestPlacer(
            self.registry,
            PolicyParts(
                config=config.routing,
                clock=self._clocks.monotonic,
                ring=self.registry.ring,
                blocks=blocks,
            ),
            self.metrics,
        )
        if live is not None:
            live.add(lambda changed: self._placing.prepare(changed.routing))
        self._on_lost = [self._placing.forget]
        self.registry.on_add.append(self._watch_breaker)

    async def __aenter__(self) -> GatewayRuntime:
        config, stack = self._config, self._stack
        await stack.enter_async_context(self._upstream)
        if self._traces is not None:
            stack.push_async_callback(self._traces.close)
        probe = HttpProbe(
            self._upstream,
            config.workers,
            config.health,
            settings=config.routing.cache_events,
        )
        self._follow_caches()
        grpc = self._grpc
        if grpc is not None:
            await stack.enter_async_context(grpc.upstream)
            self.registry.on_remove.append(grpc.removed)
        probes = Probes(probe, None if grpc is None else grpc.probe)
        self.jobs = Jobs(
            JobParts(
                registry=self.registry,
                discover=probes.discover,
                config=config.workers,
                breaker=config.breaker,
                drain_s=config.server.drain_s,
                clock=self._clocks.monotonic,
                wall=self._clocks.wall,
            )
        )
        self._share()
        health = self._health = HealthChecks(
            self.registry, config.health, probes.is_healthy, self._count_check, self._lost
        )
        monitor = LoadMonitor(self.registry, probes.load, config.health.interval_s)
        stack.push_async_callback(health.close)
        stack.push_async_callback(self.jobs.close)
        monitoring = asyncio.create_task(monitor.run())
        stack.callback(monitoring.cancel)
        self._gateway = self._application(probe, health)
        self.app = self._with_cors(self._gateway)
        for spec in self._specs:
            self.jobs.add(spec)
        for source in self._sources:
            reconciler = Reconciler(
                source,
                self.registry,
                self.jobs,
                self.metrics.discovery,
                self._clocks.monotonic,
            )
            looking = asyncio.create_task(reconciler.run(config.discovery.interval_s))
            stack.callback(looking.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def num_healthy(self) -> int:
        """Number of healthy workers."""
        return sum(worker.is_healthy for worker in self.registry.workers)

    def suspect(self, url: str) -> None:
        """Probe the worker at an address now: a connection to it failed."""
        worker = self.registry.by_url(url)
        if worker is not None:
            self._health.suspect(worker)

    async def drain(self, seconds: float) -> None:
        """Report not ready, so that load balancers send nothing new; wait until no call runs."""
        self._draining = True
        deadline = self._clocks.monotonic() + seconds
        while self._gateway.num_inside and self._clocks.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    def _share(self) -> None:
        peers = self._peers
        if peers is None:
            return
        sharing = Sharing(
            SharingParts(
                channel=PeerChannel(peers.folder, peers.number, peers.count),
                number=peers.number,
                registry=self.registry,
                placing=self._placing,
                jobs=self.jobs,
                clients=self._gate.clients,
                clock=self._clocks.monotonic,
            )
        )
        sharing.start()
        self._worker_changed = sharing.worker_changed
        self._stack.push_async_callback(sharing.close)

    def _follow_caches(self) -> None:
        if self._blocks is None:
            return
        following = CacheFollower(self._blocks)
        self.registry.on_add.append(following.follow)
        self.registry.on_remove.append(following.leave)
        self._on_lost.append(following.lost)
        self._stack.push_async_callback(following.close)

    def _lost(self, worker: Worker) -> None:
        for listener in self._on_lost:
            listener(worker)

    def _application(self, probe: HttpProbe, health: HealthChecks) -> Gateway:
        config, clock = self._config, self._clocks.monotonic
        keeps = self._gate.clients.open
        pages = TrustedPages(config.server.cors_origins, keeps)
        exchange = ExchangeParts(
            registry=self.registry,
            placing=self._placing,
            sender=RequestSender(
                self._upstream, Forwarding(config.workers, keeps, pages), config.failover
            ),
            health=health,
            recovery=Recovery(self.registry, config.failover, clock),
            metrics=self.metrics,
            budget=RetryBudget(config.retry.budget),
            retry=config.retry,
            failover=config.failover,
            limits=config.limits,
            clock=clock,
            wall=self._clocks.wall,
        )
        router = HttpRouter(
            RouterParts(
                exchange=exchange,
                admission=self._admission,
                clients=self._gate.clients,
                limits=config.limits,
                max_body_bytes=config.server.max_body_bytes,
                has_peers=self._peers is not None,
                grpc=None if self._grpc is None else self._grpc.router(exchange, self._library),
                prompts=PromptIds(self.registry, self._library) if self._tokenises else None,
            )
        )
        self._stack.push_async_callback(router.close)
        information = Information(
            InformationParts(
                registry=self.registry,
                probe=probe,
                draining=lambda: self._draining,
                wall=self._clocks.wall,
                started=self._clocks.wall(),
                shown=self._shown,
            )
        )
        workers = WorkerRoutes(self.registry, self.jobs, self._worker_changed)
        texts = TextRoutes(self._library)
        routes = [*PASSED, *information.routes, *workers.routes, *texts.routes]
        serving: Serving = router
        if self._upstreams is not None:
            serving = passing = self._pass_through(self._upstreams)
            routes = [*PROVIDED, *passing.routes]
        ages = InflightAges(clock)
        self.metrics.registry.register(ages)
        self.metrics.registry.register(WorkerGauges(self.registry, self._placing))
        return Gateway(
            AppParts(
                table=RouteTable([*routes, *self._settings, *PAGE]),
                gate=self._gate,
                router=serving,
                metrics=self.metrics.http,
                ages=ages,
                clock=clock,
                id_headers=config.server.request_id_headers,
                body_memory=BodyMemory(config.limits.bodies_bytes, "limits.bodies_bytes"),
                tracing=self._traces or NoTracing(),
                access_log=config.server.access_log,
                audit=config.control.audit,
            )
        )

    def _pass_through(self, upstreams: Upstreams) -> PassThrough:
        clocks = self._clocks
        passing = PassThroughBuilder(
            config=self._config,
            upstreams=upstreams,
            http=self._upstream,
            clients=self._gate.clients,
            metrics=self.metrics,
            clock=clocks.monotonic,
            wall=clocks.wall,
            process="0" if self._peers is None else str(self._peers.number),
        )
        return passing.build(self._stack)

    @property
    def _tokenises(self) -> bool:
        """Whether prompts for text workers are tokenised, to know which worker caches them."""
        return self._blocks is not None and self._config.tokens.tokenizer is not None

    def _with_cors(self, app: ASGIApp) -> ASGIApp:
        origins = self._config.server.cors_origins
        if not origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )

    def _count_check(self, worker: Worker, ok: bool) -> None:
        result = "success" if ok else "failure"
        self.metrics.worker.checks.labels(worker.kind, result).inc()

    def _watch_breaker(self, worker: Worker) -> None:
        def changed(old: BreakerState, new: BreakerState) -> None:
            self.metrics.worker.transitions.labels(worker.url, old.value, new.value).inc()

        worker.breaker.on_change.append(changed)


def _no_peers(url: str, spec: WorkerSpec | None) -> None:
    """Do nothing: the gateway has one process."""


class ClosingTracing(Tracing, Protocol):
    """A tracer that must be closed."""

    async def close(self) -> None:
        """Flush the remaining spans."""
        ...


def traces_of(config: RouteConfig) -> ClosingTracing | None:
    """Build the tracer, if tracing is enabled.

    Raises:
        ConfigError: A package is missing.
    """
    if not config.observe.trace:
        return None
    try:
        from sylvan.gateway.observe.traces import SpanExporter  # needs an extra
    except ImportError as error:
        raise ConfigError(f"observe.trace: {error}: pip install 'sylvan[trace]'") from error
    return SpanExporter(config.observe.trace_endpoint)


def identity_tokens(control: ControlConfig, upstream: HttpUpstream, clock: Clock) -> Tokens | None:
    """Build the verifier of operators' identity tokens, if one is configured.

    Raises:
        ConfigError: A package or a setting is missing.
    """
    if control.jwt_issuer is None:
        return None
    try:
        from sylvan.gateway.security.tokens import IdentityTokens  # needs an extra
    except ImportError as error:
        raise ConfigError(f"control.jwt_issuer: {error}: pip install 'sylvan[jwt]'") from error
    return IdentityTokens(control, upstream, clock)


class GrpcSide(Protocol):
    """Serves workers that speak gRPC; needs the extra `grpc`."""

    @property
    def upstream(self) -> AbstractAsyncContextManager[object]:
        """The channels to workers; enter it before use."""
        ...

    @property
    def probe(self) -> GrpcProbing:
        """Probes workers."""
        ...

    def removed(self, worker: Worker) -> None:
        """Forget a worker that was removed."""
        ...

    async def tokenizer(self, worker: Worker) -> tuple[bytes, str]: ...

    def router(self, exchange: ExchangeParts, library: TextLibrary) -> GrpcServing:
        """Build the router."""
        ...


def grpc_side(config: RouteConfig) -> GrpcSide | None:
    """Build the gRPC side of a gateway, if gRPC is installed.

    Raises:
        ConfigError: A gRPC worker is configured, but gRPC is not installed.
    """
    if importlib.util.find_spec("grpc") is not None:
        from sylvan.gateway.grpc.build import GrpcComponents  # needs an extra

        return GrpcComponents(config)
    for url in config.workers.urls:
        if url.startswith("grpc"):
            raise ConfigError(f"workers.urls: {url}: needs pip install 'sylvan[grpc]'")
    return None


def client_keys(path: str | None) -> list[KeyEntry]:
    """Load the keys of clients, besides the gateway's own key.

    Raises:
        ConfigError: The file is invalid, or contains rules that only servers can enforce.
    """
    entries = read_key_file(path) if path else []
    for entry in entries:
        if entry.adapters is not None:
            message = f"server.api_key_file: {path}: adapters of {entry.tenant!r} are checked by"
            raise ConfigError(f"{message} servers: give them in the key files of servers")
    return entries


def initial_specs(config: RouteConfig) -> list[WorkerSpec]:
    """Read the workers named in the configuration; they may still be starting.

    Raises:
        ConfigError: An address is malformed, or only one side of prefill and decode is given.
    """
    workers = config.workers
    if bool(workers.prefill_urls) is not bool(workers.decode_urls):
        raise ConfigError("workers.prefill_urls and workers.decode_urls must be set together")
    given: list[tuple[str, Kind, str]] = [
        *(("workers.urls", "regular", url) for url in workers.urls),
        *(("workers.prefill_urls", "prefill", url) for url in workers.prefill_urls),
        *(("workers.decode_urls", "decode", url) for url in workers.decode_urls),
    ]
    specs: list[WorkerSpec] = []
    for path, kind, text in given:
        url, _, port = text.partition("#")
        if port and not (port.isdigit() and kind == "prefill" and 0 < int(port) < 65536):
            raise ConfigError(f"{path}: {text!r}: {port!r} is not a bootstrap port")
        spec = WorkerSpec(
            url=url or " ",
            worker_type=kind,
            bootstrap_port=int(port) if port else None,
            api_key=workers.api_key.reveal() if workers.api_key else None,
            max_connection_attempts=PATIENT,
            dp_aware=workers.dp_aware,
        )
        try:
            specs.append(checked(spec))
        except RequestError as error:
            raise ConfigError(f"{path}: {error}") from error
    if len({spec.url for spec in specs}) < len(specs):
        raise ConfigError("workers: an address is given twice")
    return specs


def discovery_sources(config: RouteConfig) -> list[WorkerSource]:
    """Build the configured discovery sources.

    Raises:
        ConfigError: A target is malformed.
    """
    workers, discovery = config.workers, config.discovery
    template = WorkerSpec(
        url=" ",
        api_key=workers.api_key.reveal() if workers.api_key else None,
        max_connection_attempts=PATIENT,
        dp_aware=workers.dp_aware,
    )
    sources: list[WorkerSource] = []
    if discovery.file is not None:
        sources.append(FileSource(Path(discovery.file), template))
    if discovery.dns is not None:
        sources.append(DnsSource(discovery.dns, template))
    if discovery.kubernetes:
        try:
            from sylvan.gateway.discovery.kubernetes import (  # needs an extra
                KubernetesSource,
                PodGroup,
            )
        except ImportError as error:
            message = f"discovery.kubernetes: {error}: pip install 'sylvan[kubernetes]'"
            raise ConfigError(message) from error
        groups = [
            PodGroup("prefill", discovery.prefill_selector),
            PodGroup("decode", discovery.decode_selector),
            PodGroup("regular", discovery.selector),
        ]
        chosen = [group for group in groups if group.labels]
        sources.append(KubernetesSource(chosen, discovery, template))
    return sources


def public(config: RouteConfig) -> dict[str, Any]:
    """Return the settings without secrets, for `/server_info`."""
    return dump(config, schema=ROUTE)
