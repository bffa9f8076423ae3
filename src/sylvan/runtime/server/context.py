"""The dependencies of routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sylvan.api.native import RequestBodyLimits
from sylvan.api.sampling import SamplingDefaults
from sylvan.config.keys import read_key_file
from sylvan.config.live import LiveSettings
from sylvan.config.tree import Config
from sylvan.runtime.server.body import Bodies
from sylvan.runtime.server.connections import Connections
from sylvan.runtime.server.detached import Detached
from sylvan.runtime.server.faults import DiskFaults, JumpingClock
from sylvan.runtime.server.keyring import Keyring
from sylvan.runtime.server.live_settings import CallerSettings, make_live
from sylvan.runtime.server.metrics import Accounts
from sylvan.runtime.server.observe.build import Observing, observe
from sylvan.runtime.server.recent import RecentRequests
from sylvan.runtime.server.settings import CurrentSettings, ServerSettings
from sylvan.runtime.server.shared_prompts import shared_starts
from sylvan.runtime.server.stores.batch_worker import BatchWorker
from sylvan.runtime.server.stores.batches import BatchStore
from sylvan.runtime.server.stores.responses import ResponseStore
from sylvan.runtime.server.stores.service import Batches
from sylvan.runtime.server.tenant_calls import TenantCalls
from sylvan.runtime.serving.pairing import Role
from sylvan.runtime.serving.service import GenerationService, make_service, wall_clock
from sylvan.runtime.serving.sessions import SessionStore
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.weight_updates import WeightUpdates
from sylvan.text.chat_template import ChatTemplate
from sylvan.text.parsers import Parsers
from sylvan.utils.clock import Clock, monotonic
from sylvan.utils.tasks import SharedTask


@dataclass(frozen=True, kw_only=True)
class Context:
    """The dependencies of routes.

    Attributes:
        service: Serves generation and embedding calls.
        current: The settings in force.
        keyring: Client keys and budgets.
        responses: Stored responses.
        conversations: Stored conversations: items next to an empty reply.
        batches: Files, and batches of requests.
        accounts: Metrics and budgets.
        recent: The newest requests.
        observing: Traces and logs of requests.
        updates: Weight updates.
        probe: The health probe in progress.
        detached: Calls that outlive their client.
        started: Wall-clock time of the start.
        bodies: Bodies of calls in flight.
        calls: Number of calls in flight per tenant.
        role: This server's role under disaggregation.
        live: Changes settings at run time; None: not possible.
    """

    service: GenerationService
    current: CurrentSettings
    keyring: Keyring
    responses: ResponseStore
    conversations: ResponseStore
    batches: Batches
    accounts: Accounts
    recent: RecentRequests
    observing: Observing
    updates: WeightUpdates
    bodies: Bodies
    calls: TenantCalls
    probe: SharedTask[bool] = field(default_factory=SharedTask[bool])
    detached: Detached = field(default_factory=Detached)
    started: float = 0.0
    role: Role = field(default_factory=Role)
    live: LiveSettings[Config] | None = None

    @property
    def settings(self) -> ServerSettings:
        """The settings in force."""
        return self.current.now

    @property
    def engine(self) -> TokenizerManager:
        """The engine client."""
        return self.service.manager

    @property
    def template(self) -> ChatTemplate:
        """Renders conversations as prompts."""
        return self.service.template

    @property
    def parsers(self) -> Parsers:
        """Parses output into reasoning, answer and tool calls."""
        return self.service.parsers

    @property
    def sessions(self) -> SessionStore:
        """Sessions of `/generate`."""
        return self.service.sessions

    @property
    def defaults(self) -> SamplingDefaults:
        """Default sampling parameters."""
        return self.service.defaults

    @property
    def limits(self) -> RequestBodyLimits:
        """Limits of a body."""
        return self.service.limits

    @property
    def clock(self) -> Clock:
        """Monotonic clock, for durations."""
        return self.service.clock

    @property
    def wall(self) -> Callable[[], float]:
        """Seconds since the Unix epoch."""
        return self.service.wall

    @property
    def ids(self) -> Callable[[int], str]:
        """Returns an unguessable ID of that many bytes, in hex."""
        return self.service.ids


def make_context(
    engine: TokenizerManager,
    settings: ServerSettings,
    clock: Clock = monotonic,
    *,
    live: LiveSettings[Config] | None = None,
    connections: Connections | None = None,
) -> Context:
    """Build the dependencies of routes.

    Args:
        engine: The engine client.
        settings: The server settings.
        clock: Monotonic clock, for durations.
        live: Changes settings at run time.
        connections: Connections, whose limits can change at run time.

    Raises:
        ConfigError: A setting names something unknown, or a file is unreadable.
    """
    current = CurrentSettings(settings)
    server, limits, faults = settings.server, settings.limits, settings.faults
    entries = read_key_file(server.api_key_file) if server.api_key_file else []
    keyring = Keyring(settings.api_keys, entries, clock)
    engine.adapters.limit(keyring.adapters)
    wall: Callable[[], float] = wall_clock
    if faults.clock_jump_s:
        wall = JumpingClock(faults, wall_clock, clock)
    disk = DiskFaults(faults) if faults.disk_full or faults.disk_delay_s else None
    store = BatchStore(server.data_dir, disk)
    kept = (server.response_store_size, limits.response_bytes, limits.retention_s, clock)
    bodies = Bodies(settings.bodies)
    times = (clock, wall)
    service = make_service(engine, settings.text, current.bounds, settings.sessions, *times)
    files, variables = settings.text.shared_system_prompts, service.variables({})
    for start in shared_starts(files, service.template, variables):
        engine.isolation.share(start)
    return Context(
        service=service,
        role=Role(settings.role, settings.switches_role),
        current=current,
        keyring=keyring,
        live=live
        and make_live(live, CallerSettings(current, keyring, engine), connections, bodies),
        accounts=Accounts(engine, keyring, settings),
        recent=RecentRequests(engine.router, clock, wall_clock),
        observing=observe(engine, settings.observe, settings.served_model_name, clock),
        responses=ResponseStore(*kept),
        conversations=ResponseStore(*kept),
        updates=engine.updates,
        bodies=bodies,
        calls=TenantCalls(limits.calls_per_tenant),
        batches=Batches(store, BatchWorker(store, wall)),
        started=wall_clock(),
    )
