"""How the ranks of a replica connect: one configuration, one mesh, one stream of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from sylvan.config import Config
from sylvan.kernels.collective.gloo import file_store, join_ranks
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.ranks import SharedRanks
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.engine.child_main import ChildMain
from sylvan.runtime.engine.roles import MEETING, streams_of
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.ranks import FromRank, RankedExecutor, ToRank
from sylvan.runtime.features.disagg.decode import DecodeRole
from sylvan.runtime.features.disagg.prefill import PrefillRole
from sylvan.runtime.features.embeddings.control import EmbeddingCapability
from sylvan.runtime.features.grammar.control import GrammarControl
from sylvan.runtime.features.lora.control import Lora
from sylvan.runtime.features.prompt_logprobs.control import PromptLogprobsCapability
from sylvan.runtime.features.recurrent.control import RecurrentStates
from sylvan.runtime.features.speculation.by_head import HeadSpeculation
from sylvan.runtime.layers.mesh import Mesh
from sylvan.transport.api import Duplex, DuplexChannel

_WITH_WORKERS = (
    EmbeddingCapability,
    PromptLogprobsCapability,
    RecurrentStates,
    GrammarControl,
    Lora,
    HeadSpeculation,
    PrefillRole,
    DecodeRole,
)
"""Control halves whose work is sent to every rank."""


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """First message to a rank: the resolved configuration."""

    config: Config


def step_codec() -> StepCodec:
    """Return the codec of steps between ranks."""
    return StepCodec(
        {control.name: control.work_type for control in _WITH_WORKERS},
        {c.name: c.report_type for c in _WITH_WORKERS if c.report_type is not None},
    )


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The other ranks of a model, from the first rank's view.

    Attributes:
        others: Channels to the other ranks, by rank.
        meeting: Rendezvous file.
    """

    others: Sequence[DuplexChannel[StartRank | ToRank, FromRank]]
    meeting: Path

    def start(self, config: Config) -> Mesh:
        """Send the others the configuration, and join them.

        Raises:
            RankLostError: Some did not join in time; the message names the first.
        """
        for other in self.others:
            other.send(StartRank(config))
        return join_mesh(config, self.meeting, 0)

    def executor(self, own: Executor, mesh: Mesh) -> Executor:
        """Build the executor that spans all ranks."""
        return RankedExecutor(own, self.others, step_codec(), mesh.tp.check)


def join_mesh(config: Config, meeting: Path, rank: int) -> Mesh:
    """Join the other ranks.

    Raises:
        ConfigError: Shared memory is configured, but no kernels are compiled.
        RankLostError: Some did not join in time; the message names the first.
    """
    size, timeout_s = config.parallel.tp, config.parallel.join_timeout_s
    step_timeout_s = config.scheduler.hang_timeout_s
    if config.parallel.backend != "gloo":
        try:
            shared = SharedRanks(load_library(), meeting, rank, size, step_timeout_s)
        except LibraryMissing as why:
            if config.parallel.backend == "shared":
                raise ConfigError(f"parallel.backend=shared: {why}; leave it at auto") from None
        else:
            shared.join(timeout_s)
            return Mesh(shared)
    store = file_store(str(meeting), size)
    return Mesh(join_ranks(store, rank, size, timeout_s, step_timeout_s))


def rank_group(child: ChildMain) -> RankGroup | None:
    """Open the first rank's channels; None if it is the only rank."""
    size = child.config.parallel.tp
    if size == 1:
        return None
    others: list[Any] = []
    for rank in range(1, size):
        steps, answers = streams_of(rank)
        others.append(Duplex(child.sender(steps), child.receiver(FromRank, answers)))
    return RankGroup(others, child.path(MEETING))


def rank_channel(child: ChildMain) -> DuplexChannel[FromRank, StartRank | ToRank]:
    """Open another rank's channels."""
    steps, answers = streams_of(child.rank)
    ends: Any = Duplex(child.sender(answers), child.receiver(StartRank | ToRank, steps))
    return cast("DuplexChannel[FromRank, StartRank | ToRank]", ends)
