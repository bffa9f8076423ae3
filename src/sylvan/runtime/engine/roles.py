"""The kinds of child processes of a replica, one entry of `ROLES` each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from sylvan.config import Config
from sylvan.config.env import for_compute
from sylvan.protocol.messages import Alive, Ready, TextBatch
from sylvan.protocol.shared_params import ParamsSender
from sylvan.runtime.engine.child_process import FromChild
from sylvan.runtime.engine.engine_core import Scalar
from sylvan.runtime.engine.process import DETOKENIZER_ARGV, RANK_ARGV, SCHEDULER_ARGV
from sylvan.runtime.engine.restart import RestartPolicy
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient, Send
from sylvan.runtime.tokenizer.types import ServedModelInfo

STEPS = "steps"
"""File in which a scheduler records its last steps."""

FactsOf = Callable[[Mapping[str, Scalar]], ServedModelInfo]
"""Builds the API process's information about the model from the scheduler's report."""


class ProcessObserver(Protocol):
    """Observes the processes of one role in one replica."""

    def on_ready(self, ready: Ready, send: Send) -> None:
        """A process is ready, for the first time or after a restart; `send` sends to it."""
        ...

    def on_message(self, message: FromChild) -> None:
        """The process sent a message."""
        ...

    def on_lost(self, *, injected: bool) -> None:
        """The process exited, and will be restarted unless `on_given_up` follows.

        Args:
            injected: By fault injection: no request is to blame.
        """
        ...

    def on_given_up(self) -> None:
        """The process will not be restarted."""
        ...


@dataclass(frozen=True, slots=True)
class Replica:
    """Objects that observers use."""

    client: SchedulerClient
    facts_of: FactsOf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRole:
    """A kind of child process: how it is started, monitored and restarted.

    Every process sends `Ready` after its start, or `StartFailed` with a reason. Sockets to the API
    process are created for each run, so that no message for a dead process reaches its
    successor. Sockets between the processes of a replica keep their names; leftover messages
    belong to an earlier epoch, which both sides ignore.

    Attributes:
        name: Name in logs, errors and `Supervisor.pids`.
        argv: Entry point, which reads a `ChildConfig` from stdin.
        observe: Creates the observer of the role's processes in a replica.
        outbox: The process's name of its socket to the API process.
        inbox: Its name of the socket with messages from the API process, if it has one.
        links: Its names of sockets to other roles of the replica, and their names there.
        group: Roles of one group are restarted together: when one of their processes exits, the
            others of the replica are stopped, and all are restarted. Empty: a group of its own.
        peers: Its names of sockets and files shared within its group, and their names there;
            recreated each time the group starts.
        rank: Its rank among the processes that hold the model.
        node: The machine whose ranks it represents; 0: a process of this machine.
        environment: Returns its environment variables.
        restart: Restart policy.
        heartbeat_limit_s: Age of its last heartbeat at which it counts as hung; None for
            processes without heartbeats.
        starts_first: Start it before the API process's other start-up work.
    """

    name: str
    argv: tuple[str, ...]
    observe: Callable[[Replica], ProcessObserver]
    outbox: str
    inbox: str | None = None
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    group: str = ""
    peers: Mapping[str, str] = field(default_factory=dict[str, str])
    rank: int = 0
    node: int = 0
    environment: Callable[[], Mapping[str, str]] = for_compute
    restart: RestartPolicy = RestartPolicy()  # noqa: RUF009 - immutable
    heartbeat_limit_s: Callable[[Config], float] | None = None
    starts_first: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerObserver:
    """Connects the client to each run of the scheduler."""

    replica: Replica

    def on_ready(self, ready: Ready, send: Send) -> None:
        facts = self.replica.facts_of(ready.facts)
        self.replica.client.connect(ParamsSender(send).send, facts)

    def on_message(self, message: FromChild) -> None:
        if not isinstance(message, TextBatch | Alive):
            self.replica.client.on_message(message)

    def on_lost(self, *, injected: bool) -> None:
        self.replica.client.disconnect(injected=injected)

    def on_given_up(self) -> None:
        self.replica.client.give_up()


@dataclass(frozen=True, slots=True)
class DetokenizerObserver:
    """Pauses requests while there is no detokenizer, then replays them."""

    replica: Replica

    def on_ready(self, ready: Ready, send: Send) -> None:
        self.replica.client.detokenizer_ready()

    def on_message(self, message: FromChild) -> None:
        if isinstance(message, TextBatch):
            self.replica.client.on_texts(message)

    def on_lost(self, *, injected: bool) -> None:
        self.replica.client.detokenizer_lost(injected=injected)

    def on_given_up(self) -> None:
        self.replica.client.give_up()


@dataclass(frozen=True, slots=True)
class RankObserver:
    """Does nothing: ranks restart with the scheduler's process, whose observer acts."""

    replica: Replica

    def on_ready(self, ready: Ready, send: Send) -> None:
        pass

    def on_message(self, message: FromChild) -> None:
        pass

    def on_lost(self, *, injected: bool) -> None:
        pass

    def on_given_up(self) -> None:
        self.replica.client.give_up()


SCHEDULER = ProcessRole(
    name="scheduler",
    argv=SCHEDULER_ARGV,
    observe=SchedulerObserver,
    inbox="inbox",
    outbox="replies",
    links={"stops": "stops", "text": "text", STEPS: STEPS},
    heartbeat_limit_s=lambda config: config.scheduler.hang_timeout_s,
    starts_first=True,  # has the longest imports
)

DETOKENIZER = ProcessRole(
    name="detokenizer",
    argv=DETOKENIZER_ARGV,
    observe=DetokenizerObserver,
    outbox="texts",
    links={"inbox": "text", "stops": "stops"},
    heartbeat_limit_s=lambda config: config.scheduler.hang_timeout_s,
)

ROLES = (SCHEDULER, DETOKENIZER)
"""The processes of a replica whose model one process holds, in start order."""


def roles_of(config: Config) -> tuple[ProcessRole, ...]:
    """Return the processes of a replica; with ranks, the first is the scheduler's process."""
    if config.parallel.ranks == 1:
        return ROLES
    size = config.parallel.ranks_per_node  # on this machine, node 0
    shared = {RENDEZVOUS: RENDEZVOUS}
    streams = {name: name for rank in range(1, size) for name in streams_of(rank)}
    first = replace(SCHEDULER, group="ranks", peers=shared | streams)
    others = (
        ProcessRole(
            name=f"rank-{rank}",
            argv=RANK_ARGV,
            observe=RankObserver,
            outbox="replies",
            group="ranks",
            peers=shared | {name: name for name in streams_of(rank)},
            rank=rank,
            heartbeat_limit_s=lambda config: config.parallel.rank_timeout_s,
            starts_first=True,
        )
        for rank in range(1, size)
    )
    nodes = (
        ProcessRole(
            name=f"node-{node}",
            argv=(),
            observe=RankObserver,
            outbox="",
            group="ranks",
            node=node,
            heartbeat_limit_s=lambda config: config.parallel.rank_timeout_s,
            starts_first=True,
        )
        for node in range(1, config.parallel.nodes)
    )
    return (first, *others, *nodes, DETOKENIZER)


RENDEZVOUS = "meeting"
"""Rendezvous file of the ranks."""


def streams_of(rank: int) -> tuple[str, str]:
    """Return the names of the sockets from the first rank to another, and back."""
    return f"steps-{rank}", f"answers-{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The processes that serve a model: those of `roles`, per replica.

    `roles` None: derived from the configuration.
    """

    num_replicas: int = 1
    roles: tuple[ProcessRole, ...] | None = None
