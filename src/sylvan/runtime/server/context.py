"""What every route is given."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sylvan.api.native import Limits
from sylvan.api.sampling import SamplingDefaults, model_defaults, read_sampling
from sylvan.config.keys import read_key_file
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.server.body import Bodies
from sylvan.runtime.server.detached import Detached
from sylvan.runtime.server.faults import DiskFaults, JumpingClock
from sylvan.runtime.server.journal import CallJournal, Journal, NoJournal
from sylvan.runtime.server.keyring import Keyring
from sylvan.runtime.server.metrics import Accounts
from sylvan.runtime.server.observe.build import Observing, observe
from sylvan.runtime.server.pairing import Pairing, Role
from sylvan.runtime.server.recent import RecentRequests
from sylvan.runtime.server.settings import ServerSettings
from sylvan.runtime.server.shared_prompts import shared_starts
from sylvan.runtime.server.stores.batches import BatchStore
from sylvan.runtime.server.stores.responses import ResponseStore
from sylvan.runtime.server.stores.service import Batches
from sylvan.runtime.server.stores.sessions import SessionStore
from sylvan.runtime.server.stores.worker import BatchWorker
from sylvan.runtime.server.under_way import TenantCalls
from sylvan.runtime.tokenizer.manager import NO_ORIGIN, TokenizerManager
from sylvan.runtime.tokenizer.types import Origin
from sylvan.runtime.tokenizer.updates import WeightUpdates
from sylvan.text.chat_template import ChatTemplate
from sylvan.text.parsers import Parsers, make_parsers
from sylvan.utils.clock import Clock, monotonic
from sylvan.utils.json_files import read_json
from sylvan.utils.tasks import Shared


def wall_clock() -> float:
    """Seconds since 1970, for the time stamps that clients read."""
    return datetime.now(tz=UTC).timestamp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The parts that routes work with.

    Attributes:
        engine: Where requests go.
        settings: What the operator decided.
        keyring: Keys and budgets of clients.
        defaults: Sampling parameters for fields that a request leaves out.
        template: Conversations to prompts.
        parsers: Output to reasoning, answer and tool calls.
        responses: Stored responses.
        conversations: Stored conversations: items beside a reply without any.
        sessions: Past turns of `/generate`.
        batches: Files, and requests that are worked off when there is time.
        accounts: Counts what is served.
        recent: The newest requests.
        observing: Traces and logs of requests.
        updates: Replaces weights, in one call or several.
        probe: The one probe of health that is under way.
        detached: Calls that go on without their client.
        clock: Monotonic; for durations.
        wall: Seconds since 1970; for time stamps.
        started: Time stamp of the start.
        bodies: Of the calls under way.
        calls: How many of them each tenant has.
        ids: Names that nobody can guess, of so many bytes, in hexadecimal digits.
        journal: Of the call.
        pairing: The other server of the call.
        origin: The call, for metrics, logs and traces.
        role: What this server does of calls with a room.
    """

    engine: TokenizerManager
    settings: ServerSettings
    keyring: Keyring
    defaults: SamplingDefaults
    template: ChatTemplate
    parsers: Parsers
    responses: ResponseStore
    conversations: ResponseStore
    sessions: SessionStore
    batches: Batches
    accounts: Accounts
    recent: RecentRequests
    observing: Observing
    updates: WeightUpdates
    bodies: Bodies
    calls: TenantCalls
    probe: Shared[bool] = field(default_factory=Shared[bool])
    detached: Detached = field(default_factory=Detached)
    clock: Clock = monotonic
    wall: Callable[[], float] = wall_clock
    started: float = 0.0
    ids: Callable[[int], str] = secrets.token_hex
    journal: CallJournal = field(default_factory=NoJournal)
    pairing: Pairing = field(default_factory=Pairing)
    origin: Origin = NO_ORIGIN
    role: Role = field(default_factory=Role)

    @property
    def limits(self) -> Limits:
        """Bounds on one body."""
        return Limits(
            max_samples=self.settings.max_batch_samples,
            max_top_logprobs=self.settings.max_top_logprobs,
        )


def of_call(context: Context, journal: Journal) -> Context:
    """The parts for one call with a journal: names and times are those of its ticket."""
    wall = journal.wall(context.clock)
    return replace(context, ids=journal.ids, wall=wall, journal=journal)


def make_context(
    engine: TokenizerManager, settings: ServerSettings, clock: Clock = monotonic
) -> Context:
    """Everything that routes need.

    Raises:
        ConfigError: A setting names something that does not exist, or cannot be read.
    """
    entries = read_key_file(settings.api_key_file) if settings.api_key_file else []
    keyring = Keyring(settings.api_keys, entries, clock)
    engine.adapters.limit(keyring.adapters)
    faults = settings.faults
    wall: Callable[[], float] = wall_clock
    if faults.clock_jump_s:
        wall = JumpingClock(faults, wall_clock, clock)
    disk = DiskFaults(faults) if faults.disk_full or faults.disk_delay_s else None
    store = BatchStore(settings.data_dir, disk)
    size, most = settings.response_store_size, settings.max_response_bytes
    kept = (size, most, settings.retention_s, clock)
    template = ChatTemplate(engine.tokenizer)
    files, variables = settings.shared_system_prompts, settings.default_chat_template_kwargs
    for start in shared_starts(files, template, variables):
        engine.isolation.share(start)
    return Context(
        role=Role(settings.role, settings.switches_role),
        engine=engine,
        settings=settings,
        keyring=keyring,
        accounts=Accounts(engine, keyring, settings),
        recent=RecentRequests(engine.router, clock, wall_clock),
        observing=observe(engine, settings.observe, settings.served_model_name, clock),
        defaults=sampling_defaults(settings, engine.facts.model_path),
        template=template,
        parsers=make_parsers(
            engine.tokenizer,
            reasoning_parser=settings.reasoning_parser,
            tool_parser=settings.tool_parser,
            architecture=engine.facts.architecture,
        ),
        responses=ResponseStore(*kept),
        conversations=ResponseStore(*kept),
        sessions=SessionStore(engine.abort, engine.tokenizer.bos_id, clock, settings.sessions),
        updates=engine.updates,
        bodies=Bodies(settings.bodies),
        calls=TenantCalls(settings.calls_per_tenant),
        batches=Batches(store, BatchWorker(store, wall)),
        clock=clock,
        wall=wall,
        started=wall_clock(),
    )


def read_generation_config(model_path: str) -> Mapping[str, Any]:
    """The checkpoint's `generation_config.json`; empty if there is none."""
    try:
        value = read_json(Path(model_path) / "generation_config.json")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def sampling_defaults(settings: ServerSettings, model_path: str) -> SamplingDefaults:
    """Defaults of the operator and of the checkpoint.

    Raises:
        ConfigError: Those of the operator are no sampling parameters.
    """
    try:
        read_sampling(settings.preferred_sampling_params, {}, "text.preferred_sampling_params")
    except RequestError as error:
        raise ConfigError(str(error)) from error
    model: dict[str, Any] = {}
    if settings.sampling_defaults == "model":
        model = model_defaults(read_generation_config(model_path))
    return SamplingDefaults(preferred=dict(settings.preferred_sampling_params), model=model)
