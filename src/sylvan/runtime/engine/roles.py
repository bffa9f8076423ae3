"""The kinds of child processes of a replica, as data: one entry of `ROLES` for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from sylvan.config import Config
from sylvan.config.env import for_compute
from sylvan.protocol.messages import Alive, Ready, TextBatch
from sylvan.protocol.shared_params import ParamsSender
from sylvan.runtime.engine.child_process import FromChild
from sylvan.runtime.engine.composition import Scalar
from sylvan.runtime.engine.process import DETOKENIZER_ARGV, RANK_ARGV, SCHEDULER_ARGV
from sylvan.runtime.engine.restart import RestartPolicy
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient, Send
from sylvan.runtime.tokenizer.types import ServedModelInfo

STEPS = "steps"
"""File in which a scheduler notes its last steps."""

FactsOf = Callable[[Mapping[str, Scalar]], ServedModelInfo]
"""What the API process knows of the model, from what the scheduler reported."""


class ProcessObserver(Protocol):
    """Is told what happens to the processes of one role in one replica."""

    def on_ready(self, ready: Ready, send: Send) -> None:
        """A process got ready, for the first time or after a loss; `send` reaches it."""
        ...

    def on_message(self, message: FromChild) -> None:
        """It sent a message."""
        ...

    def on_lost(self, *, inflicted: bool) -> None:
        """It has ended, and is started again unless `on_given_up` follows.

        Args:
            inflicted: By us, on request: no request is to blame.
        """
        ...

    def on_given_up(self) -> None:
        """It will not be started again."""
        ...


@dataclass(frozen=True, slots=True)
class Replica:
    """What observers act on."""

    client: SchedulerClient
    facts_of: FactsOf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRole:
    """A kind of child process: how it is started, watched and restarted.

    Every process sends `Ready` once it is, or `Failed` with a reason. Sockets towards the API
    process are made anew for each run, so that nothing meant for a dead process reaches its
    successor. Sockets between the processes of a replica keep their names; what is left in them
    belongs to an earlier epoch, which both sides ignore.

    Attributes:
        name: For logs, errors and `Supervisor.pids`.
        argv: Entry point: reads a `ChildConfig` from its standard input.
        observe: Makes the observer of the role's processes in a replica.
        outbox: The process's name for its socket to the API process.
        inbox: Its name for the socket on which it takes messages of the API process, if it does.
        links: Its names for sockets to others of its replica, and what these are called there.
        group: Roles of one group live together: when one of its processes has ended, the others of
            the replica are ended, and all are started anew. Empty: the role is a group of its own.
        peers: Its names for sockets and files that it shares with its group, and what these are
            called there; made anew each time the group is started.
        rank: Number of the process among those that hold a model together.
        node: The machine whose ranks it stands for; 0: it is a process of this machine.
        environment: Makes the environment variables.
        restart: When it is started again after it has ended.
        heartbeat_limit_s: Age of its last heartbeat above which it is ended because it hangs; None
            for processes that send none.
        starts_first: It is started before, and not after, the other work of the API process.
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

    def on_lost(self, *, inflicted: bool) -> None:
        self.replica.client.disconnect(inflicted=inflicted)

    def on_given_up(self) -> None:
        self.replica.client.give_up()


@dataclass(frozen=True, slots=True)
class DetokenizerObserver:
    """Has requests wait while there is no detokenizer, and start over then."""

    replica: Replica

    def on_ready(self, ready: Ready, send: Send) -> None:
        self.replica.client.detokenizer_ready()

    def on_message(self, message: FromChild) -> None:
        if isinstance(message, TextBatch):
            self.replica.client.on_texts(message)

    def on_lost(self, *, inflicted: bool) -> None:
        self.replica.client.detokenizer_lost(inflicted=inflicted)

    def on_given_up(self) -> None:
        self.replica.client.give_up()


@dataclass(frozen=True, slots=True)
class RankObserver:
    """The scheduler's process is of the same group: its observer is told what matters."""

    replica: Replica

    def on_ready(self, ready: Ready, send: Send) -> None:
        pass

    def on_message(self, message: FromChild) -> None:
        pass

    def on_lost(self, *, inflicted: bool) -> None:
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
    starts_first=True,  # its imports take longest
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
"""The processes of a replica whose model one process holds, in the order of their start."""


def roles_of(config: Config) -> tuple[ProcessRole, ...]:
    """The processes of a replica: with several ranks, the first is the scheduler's process."""
    if config.parallel.tp == 1:
        return ROLES
    size = config.parallel.tp // config.parallel.nodes  # on this machine, node 0
    shared = {MEETING: MEETING}
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


MEETING = "meeting"
"""File by which ranks find each other."""


def streams_of(rank: int) -> tuple[str, str]:
    """Sockets from the first rank to another, and back."""
    return f"steps-{rank}", f"answers-{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Which processes serve a model: those of `roles`, once for each replica.

    `roles` None: those of the configuration.
    """

    num_replicas: int = 1
    roles: tuple[ProcessRole, ...] | None = None
