"""Connects the ranks of a replica: one configuration, one mesh, one stream of steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from sylvan.config import Config
from sylvan.config.address import own_address, resolve_host, split_address
from sylvan.config.checkpoint import model_dir
from sylvan.config.fields import replaced
from sylvan.kernels.api import Communicator, RowDispatcher
from sylvan.kernels.collective.gloo import (
    file_store,
    join_ranks,
    listening_store,
    part_of_store,
    remote_store,
)
from sylvan.kernels.experts.deepep import DeepEPDispatcher, StoreGroup
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.ranks import SharedRanks
from sylvan.protocol.errors import ConfigError, RankLostError
from sylvan.protocol.messages import RankRendezvous
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.engine.child_main import ChildMain
from sylvan.runtime.engine.roles import RENDEZVOUS, streams_of
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.division import check_division, same_bits_obstacle
from sylvan.runtime.executor.ranks import FromRank, RankedExecutor, ToRank
from sylvan.runtime.features.disagg.decode import DecodeRole
from sylvan.runtime.features.disagg.prefill import PrefillRole
from sylvan.runtime.features.embeddings.control import EmbeddingCapability
from sylvan.runtime.features.grammar.control import GrammarControl
from sylvan.runtime.features.lora.control import Lora
from sylvan.runtime.features.multimodal.control import Multimodal
from sylvan.runtime.features.prompt_logprobs.control import PromptLogprobsCapability
from sylvan.runtime.features.recurrent.control import RecurrentStates
from sylvan.runtime.features.speculation.head_control import HeadSpeculation
from sylvan.runtime.features.tiers.control import KVTiers
from sylvan.runtime.layers.mesh import Mesh, SingleRank, UnconnectedRank
from sylvan.runtime.layers.placement import ExpertPlacement, read_placement
from sylvan.runtime.layers.stage import Stage
from sylvan.runtime.models.registry import load_config
from sylvan.transport.api import Duplex, DuplexChannel, MessageError
from sylvan.transport.hub import Hub, HubClient, HubPeer
from sylvan.utils.names import random_hex
from sylvan.utils.numa import bind_to_node

logger = logging.getLogger(__name__)

Join = Callable[[str, int, int], Communicator]
"""Joins a group, given its name, the rank in it, and its size."""

_WITH_WORKERS = (
    EmbeddingCapability,
    PromptLogprobsCapability,
    RecurrentStates,
    GrammarControl,
    Lora,
    HeadSpeculation,
    PrefillRole,
    DecodeRole,
    KVTiers,
    Multimodal,
)
"""Control halves whose work is sent to every rank."""


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """First message to a rank: the resolved configuration.

    `store`: port of the rendezvous store of ranks on several machines.
    """

    config: Config
    store: int = 0


def step_codec() -> StepCodec:
    """Return the codec of steps between ranks."""
    return StepCodec(
        {control.name: control.work_type for control in _WITH_WORKERS},
        {c.name: c.report_type for c in _WITH_WORKERS if c.report_type is not None},
    )


def with_same_bits(config: Config) -> Config:
    """Decide `parallel.same_bits` by the sizes of the model, if it is still `auto`."""
    if config.parallel.same_bits != "auto":
        return config
    if why := _why_not_alike(config):
        logger.info("parallel.same_bits=false: %s", why)
    return replaced(config, {"parallel.same_bits": not why})


def describe_ranks(config: Config) -> str:
    """Describe how a resolved configuration divides its model, without loading it.

    Raises:
        ConfigError: The model cannot be divided this way.
    """
    parallel = config.parallel
    model = load_config(model_dir(config.model), trusted=config.trust_remote_code)
    check_division(model, _without_others(config))
    parts = [f"{parallel.tp} ranks share each layer"] if parallel.tp > 1 else []
    parts += [f"{parallel.pp} stages share the layers"] if parallel.pp > 1 else []
    why = _why_not_alike(config) if parallel.same_bits == "auto" else ""
    same = parallel.same_bits is not False and not why
    bits = "the same bits as on one rank" if same else "other bits than on one rank"
    return f"{', '.join(parts)}; {bits}" + (f": {why}" if why else "")


def _why_not_alike(config: Config) -> str:
    """Return why sums depend on the number of ranks; empty if they do not."""
    model = load_config(model_dir(config.model), trusted=config.trust_remote_code)
    why = same_bits_obstacle(model, _without_others(config))
    return why.removeprefix("parallel.same_bits: ")


def _without_others(config: Config) -> Mesh:
    """The mesh of the first rank, for sizes only."""
    parallel = config.parallel
    dense, groups = parallel.moe_dense_tp, parallel.attention_groups
    return Mesh(
        UnconnectedRank(parallel.tp),
        parallel.ep,
        _placement(config),
        parallel.same_bits is True,
        Stage(0, parallel.pp),
        attention=UnconnectedRank(parallel.tp // groups) if groups > 1 else None,
        dense=None if dense in (None, parallel.tp) else UnconnectedRank(dense),
    )


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The other ranks of a model, from the first rank's view.

    Attributes:
        others: Channels to the other ranks, by rank.
        rendezvous: Rendezvous file, if all ranks are on one machine.
        remote: Ranks on other machines, if any.
    """

    others: Sequence[DuplexChannel[StartRank | ToRank, FromRank]]
    rendezvous: Path
    remote: RemoteRanks | None = None

    def start(self, config: Config) -> Mesh:
        """Send the others the configuration, and join them.

        Raises:
            ConfigError: The model does not divide so, whoever joins.
            RankLostError: Some did not join in time; the message names the first.
        """
        model = load_config(model_dir(config.model), trusted=config.trust_remote_code)
        check_division(model, _without_others(config))
        store, port = None, 0
        if self.remote is not None:
            self.remote.join(config)
            store = listening_store(self.remote.host, config.parallel.join_timeout_s)
            port = store.port
        for other in self.others:
            other.send(StartRank(config, port))
        return join_mesh(config, self.rendezvous, 0, store)

    def executor(self, own: Executor, mesh: Mesh) -> Executor:
        """Build the executor that spans all ranks."""
        several = self.remote is not None
        return RankedExecutor(
            own,
            self.others,
            step_codec(),
            mesh.check,
            several_machines=several,
            sampler=sampler_of(mesh),
        )


@dataclass(frozen=True, slots=True)
class RemoteRanks:
    """Ranks on other machines, from the first rank's view.

    Attributes:
        hub: The hub that they connect to.
        host: Address of this machine.
        tokens: Secret name of each rank, by which the hub recognises it.
    """

    hub: Hub[StartRank | ToRank, FromRank]
    host: str
    tokens: Mapping[int, str]

    def join(self, config: Config) -> None:
        """Wait until all of them have connected.

        Raises:
            RankLostError: One did not connect in time; the message names it.
        """
        timeout_s = config.parallel.join_timeout_s
        missing = self.hub.join(timeout_s)
        if missing is None:
            return
        rank = next(rank for rank, token in self.tokens.items() if token == missing)
        node = rank // config.parallel.ranks_per_node
        raise RankLostError(
            f"rank {rank} of {config.parallel.ranks}, on node {node}, did not join within "
            f"{timeout_s:g} s"
        )


def join_mesh(config: Config, rendezvous: Path | None, rank: int, store: Any = None) -> Mesh:
    """Join the other ranks.

    Args:
        config: How the model is served.
        rendezvous: File by which ranks of one machine find each other.
        rank: Rank of this process.
        store: Store by which ranks of several machines find each other; None: one machine.

    Raises:
        ConfigError: Shared memory is configured, but no kernels are compiled; or there are fewer
            GPUs than ranks.
        RankLostError: Some did not join in time; the message names the first.
    """
    _bind_to_node(config, rank)
    if config.device != "cpu":
        return _join_devices(config, rendezvous, rank, store)
    size, timeout_s = config.parallel.ranks, config.parallel.join_timeout_s
    step_timeout_s = config.scheduler.hang_timeout_s
    if store is not None:
        host = own_address(_head_host(config))

        def over_machines(name: str, rank: int, size: int) -> Communicator:
            own = part_of_store(store, name)
            return join_ranks(own, rank, size, timeout_s, step_timeout_s, host)

        return _mesh(config, rank, over_machines)
    assert rendezvous is not None, "ranks of one machine have a file"
    if config.parallel.backend != "gloo":
        try:
            library = load_library()
        except LibraryMissing as why:
            if config.parallel.backend == "shared":
                raise ConfigError(f"parallel.backend=shared: {why}; leave it at auto") from None
        else:

            def over_memory(name: str, rank: int, size: int) -> Communicator:
                path = rendezvous.with_name(rendezvous.name + name)
                shared = SharedRanks(library, path, rank, size, step_timeout_s)
                shared.join(timeout_s)
                return shared

            return _mesh(config, rank, over_memory)
    file = file_store(str(rendezvous), size)

    def over_gloo(name: str, rank: int, size: int) -> Communicator:
        return join_ranks(part_of_store(file, name), rank, size, timeout_s, step_timeout_s)

    return _mesh(config, rank, over_gloo)


def _join_devices(config: Config, rendezvous: Path | None, rank: int, store: Any) -> Mesh:
    """`join_mesh` for ranks that have a GPU each."""
    from sylvan.kernels.collective.nccl import GroupMember, choose_gpu, join_gpus  # not on a CPU

    parallel = config.parallel
    each = parallel.ranks_per_node
    device = choose_gpu(rank % each, each)
    if store is None:
        store = file_store(str(rendezvous), parallel.ranks)
    dispatcher = None
    if parallel.expert_exchange == "deepep":
        own = part_of_store(store, "deepep")
        group = StoreGroup(own, rank, parallel.ranks, parallel.join_timeout_s)
        dispatcher = DeepEPDispatcher(group)
    short = parallel.nodes == 1 and parallel.backend != "nccl"

    def over_nccl(name: str, rank: int, size: int) -> Communicator:
        return join_gpus(
            part_of_store(store, name),
            GroupMember(f"sylvan{name}", rank, size, device),
            parallel.join_timeout_s,
            config.scheduler.hang_timeout_s,
            short=short,
        )

    return _mesh(config, rank, over_nccl, dispatcher)


def _bind_to_node(config: Config, rank: int) -> None:
    """Bind this rank to one NUMA node, if the machine has several."""
    threads = config.threads if isinstance(config.threads, int) else 1
    each = config.parallel.ranks_per_node
    if cores := bind_to_node(rank % each, each, threads):
        logger.info("rank %d computes on %d cores of its NUMA node", rank, len(cores))


def _mesh(config: Config, rank: int, join: Join, dispatcher: RowDispatcher | None = None) -> Mesh:
    """Join the groups of a rank.

    Ranks are numbered stage by stage. They all join one group first, so that a missing rank is
    named.

    Args:
        config: How the model is served.
        rank: Of this process.
        join: Joins a group.
        dispatcher: Of rows to experts; None: all ranks have all rows.
    """
    parallel = config.parallel
    every = join("", rank, parallel.ranks)
    a2a = parallel.expert_exchange == "all_to_all"
    whole = Mesh(
        every,
        parallel.ep,
        _placement(config),
        parallel.same_bits is True,
        all_to_all=a2a,
        dispatcher=dispatcher,
    )
    if parallel.moe_dense_tp not in (None, parallel.tp):
        whole = replace(whole, dense=_part(join, "dense", rank, parallel.moe_dense_tp))
    if (groups := parallel.attention_groups) > 1:
        return replace(whole, attention=_part(join, "attention", rank, parallel.tp // groups))
    if parallel.pp == 1:
        return whole
    number, place = divmod(rank, parallel.tp)
    tp = _part(join, "stage", rank, parallel.tp)
    before = after = None
    if number > 0:
        before = join(f"-link-{number}-{place}", 1, 2)
    if number < parallel.pp - 1:
        after = join(f"-link-{number + 1}-{place}", 0, 2)
    stage = Stage(number, parallel.pp, before=before, after=after)
    return replace(whole, tp=tp, stage=stage)


def _placement(config: Config) -> ExpertPlacement | None:
    """Read which groups have which experts."""
    parallel = config.parallel
    path = Path(parallel.expert_placement) if parallel.expert_placement else None
    return read_placement(path, parallel.ep, parallel.redundant_experts)


def one_rank(config: Config) -> Mesh:
    """Return the mesh of a process that has the whole model."""
    return Mesh(same_bits=config.parallel.same_bits is True)


def _part(join: Join, name: str, rank: int, size: int) -> Communicator:
    """Join the group of `size` consecutive ranks that contains a rank."""
    group, place = divmod(rank, size)
    return join(f"-{name}-{group}", place, size) if size > 1 else SingleRank()


def sampler_of(mesh: Mesh) -> int:
    """Return the rank whose results count: the first one of the last stage."""
    return mesh.tp.size * (mesh.stage.count - 1)


def _head_host(config: Config) -> str:
    """Return the IPv4 address of node 0."""
    assert config.parallel.address is not None, "checked with the configuration"
    return resolve_host(split_address(config.parallel.address)[0])


def rank_group(child: ChildMain, report: Callable[[RankRendezvous], None]) -> RankGroup | None:
    """Open the first rank's channels; None if it is the only rank.

    Args:
        child: This process.
        report: Called with the address to which ranks of other machines connect.
    """
    parallel = child.config.parallel
    if parallel.ranks == 1:
        return None
    others: list[Any] = []
    for rank in range(1, parallel.ranks_per_node):
        steps, answers = streams_of(rank)
        others.append(Duplex(child.sender(steps), child.receiver(FromRank, answers)))
    remote = None
    if parallel.nodes > 1:
        remote = _listen_for_remote(child, report)
        others += [HubPeer(remote.hub, token) for token in remote.tokens.values()]
    return RankGroup(others, child.path(RENDEZVOUS), remote)


def _listen_for_remote(child: ChildMain, report: Callable[[RankRendezvous], None]) -> RemoteRanks:
    parallel, host = child.config.parallel, _head_host(child.config)
    ranks = range(parallel.ranks_per_node, parallel.ranks)
    tokens = {rank: random_hex(16) for rank in ranks}
    try:
        hub: Hub[Any, Any] = Hub(child.context, host, tuple(tokens.values()), FromRank)
    except MessageError as error:
        raise ConfigError(f"parallel.address={parallel.address}: {error}") from None
    report(RankRendezvous(port=hub.port, tokens=tokens))
    return RemoteRanks(hub, host, tokens)


def rank_channel(child: ChildMain) -> DuplexChannel[FromRank, StartRank | ToRank]:
    """Open another rank's channels."""
    if child.steps is not None:
        place = child.steps
        ends: Any = HubClient(child.context, place.address, place.token, StartRank | ToRank)
    else:
        steps, answers = streams_of(child.rank)
        ends = Duplex(child.sender(answers), child.receiver(StartRank | ToRank, steps))
    return cast("DuplexChannel[FromRank, StartRank | ToRank]", ends)


def follow_mesh(child: ChildMain, first: StartRank, config: Config) -> Mesh:
    """Join the mesh as a rank other than the first.

    Args:
        child: This process.
        first: First message of the first rank.
        config: How this rank serves the model.

    Raises:
        RankLostError: see `join_mesh`.
    """
    if not first.store:
        return join_mesh(config, child.path(RENDEZVOUS), child.rank)
    host, timeout_s = _head_host(config), config.parallel.join_timeout_s
    store = remote_store(host, first.store, timeout_s)
    return join_mesh(config, None, child.rank, store)
