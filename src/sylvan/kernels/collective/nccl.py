"""Ranks with a GPU each: NCCL, and Triton kernels over symmetric memory for short messages.

Never run on several devices. Kernels are tested in Triton's interpreter; what is exchanged by a
process group is tested with gloo, which takes the same calls.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from sylvan.kernels.api import Communicator
from sylvan.kernels.collective.gloo import GroupRanks, await_ranks, part_of_store
from sylvan.kernels.gpu.choice import triton_installed
from sylvan.protocol.errors import ConfigError, RankLostError

logger = logging.getLogger(__name__)

_TIMEOUT = "_timeout"


class ShortAllReduce(Protocol):
    """Sums of short messages: `symmetric.SymmetricAllReduce`."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is short enough."""
        ...

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_sum`."""
        ...


class DeviceRanks:
    """Implements `Communicator`: short sums one way, everything else by a process group.

    Args:
        group: The process group.
        short: None: the group does those, too.
    """

    def __init__(self, group: Communicator, short: ShortAllReduce | None = None) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._short = group, short

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(x)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_to_all(x)

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._short is not None and self._short.takes(x):
            return self._short.all_sum(x)
        return self._group.all_sum(x)

    def check(self) -> None:
        """Nothing to ask: a failed collective of a GPU ends its process."""

    def close(self) -> None:
        """Ranks that wait for this one fail."""
        self._group.close()


def choose_gpu(place: int, ranks: int) -> torch.device:
    """Make this process use the GPU with the number of its rank on this machine.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    count = torch.cuda.device_count()
    if count < ranks:
        raise ConfigError(
            f"parallel.tp: {ranks} ranks on this machine need a GPU each, and {count} can be seen; "
            "use fewer ranks, more machines (parallel.nodes), or device=cpu"
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A rank's place in a group of ranks.

    Attributes:
        group: Name of the group, within this process.
        rank: Of this process.
        size: Number of ranks.
        device: The GPU of this rank.
    """

    group: str
    rank: int
    size: int
    device: torch.device


def join_gpus(
    store: Any, member: GroupMember, timeout_s: float, step_timeout_s: float, *, short: bool
) -> Communicator:
    """Meet the other ranks at a store, which no other group uses.

    Args:
        store: Where they find each other.
        member: Of this process.
        timeout_s: Within which they must come.
        step_timeout_s: Within which a collective must be done.
        short: Whether all GPUs are in this machine, so that short messages may go by memory.

    Raises:
        ConfigError: torch has no NCCL.
        RankLostError: some did not come; names the first.
    """
    kind = getattr(importlib.import_module("torch.distributed"), "ProcessGroupNCCL", None)
    if kind is None:
        raise ConfigError(
            f"parallel.tp: torch {torch.__version__} has no NCCL, by which GPUs reach each other; "
            "install torch for CUDA or ROCm"
        )
    rank, size = member.rank, member.size
    await_ranks(store, rank, size, timeout_s)
    options = kind.Options()
    setattr(options, _TIMEOUT, timedelta(seconds=step_timeout_s))
    group = GroupRanks(kind(part_of_store(store, "nccl"), rank, size, options), rank, size)
    try:
        group.all_gather(torch.ones(1, device=member.device))  # connects them
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RankLostError(f"{size} GPUs found no way to each other: {reason}") from error
    return DeviceRanks(group, _short(store, member, group) if short else None)


def _short(store: Any, member: GroupMember, group: GroupRanks) -> ShortAllReduce | None:
    """Sums over symmetric memory; None: a rank cannot have any."""
    made, why = None, "Triton is not installed (pip install 'sylvan[gpu]')"
    if triton_installed():
        from sylvan.kernels.collective.symmetric import symmetric_all_reduce  # needs Triton

        why = "another rank has none"
        try:
            made = symmetric_all_reduce(store, member.group, member.rank, member.size, member.device)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
    everywhere = group.all_gather(torch.tensor([made is not None], device=member.device))
    if bool(everywhere.all()):
        return made
    logger.warning("no symmetric memory, NCCL adds up short messages, too: %s", why)
    return None
