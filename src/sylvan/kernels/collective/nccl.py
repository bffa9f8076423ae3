"""Ranks with a GPU each: NCCL, and Triton kernels over symmetric memory for short messages.

Never run on several devices so far. The kernels are tested in Triton's interpreter, and the calls
of process groups are tested with gloo, which has the same interface.
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
    """Sums short messages; implemented by `symmetric.SymmetricAllReduce`."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is short enough."""
        ...

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_sum`."""
        ...


class DeviceRanks:
    """Implements `Communicator`: short sums by `short`, everything else by a process group.

    Args:
        group: The process group.
        short: Sums short messages; None: the group does.
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
        """Do nothing: a failed collective on a GPU ends the process."""

    def close(self) -> None:
        """Leave the group; ranks that wait for this one fail."""
        self._group.close()


def choose_gpu(place: int, ranks: int) -> torch.device:
    """Select the GPU of this process: the one with the rank's number on this machine.

    Raises:
        ConfigError: The machine has fewer GPUs than ranks.
    """
    count = torch.cuda.device_count()
    if count < ranks:
        raise ConfigError(
            f"parallel.tp: {ranks} ranks on this machine need a GPU each, and it has {count}; "
            "use fewer ranks, more machines (parallel.nodes), or device=cpu"
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One rank of a group.

    Attributes:
        group: Name of the group, unique in this process.
        rank: Rank of this process.
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
    """Form a group with the other ranks.

    Args:
        store: Store through which the ranks find each other; used by this group only.
        member: This rank.
        timeout_s: Time limit for all ranks to join.
        step_timeout_s: Time limit of a collective.
        short: Whether all GPUs are in this machine, so that short messages may use shared memory.

    Raises:
        ConfigError: torch has no NCCL.
        RankLostError: Ranks did not join in time; the message names the first.
    """
    kind = getattr(importlib.import_module("torch.distributed"), "ProcessGroupNCCL", None)
    if kind is None:
        raise ConfigError(
            f"parallel.tp: torch {torch.__version__} has no NCCL, which connects GPUs; "
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
        raise RankLostError(f"{size} GPUs cannot connect to each other: {reason}") from error
    return DeviceRanks(group, _short(store, member, group) if short else None)


def _short(store: Any, member: GroupMember, group: GroupRanks) -> ShortAllReduce | None:
    """Set up sums over symmetric memory; None if a rank cannot have any."""
    made, why = None, "Triton is not installed (pip install 'sylvan[gpu]')"
    if triton_installed():
        from sylvan.kernels.collective.symmetric import symmetric_all_reduce  # needs Triton

        why = "another rank failed to set it up"
        try:
            made = symmetric_all_reduce(
                store, member.group, member.rank, member.size, member.device
            )
        except RuntimeError as error:
            why = str(error).splitlines()[0]
    everywhere = group.all_gather(torch.tensor([made is not None], device=member.device))
    if bool(everywhere.all()):
        return made
    logger.warning("no symmetric memory, so NCCL sums short messages, too: %s", why)
    return None
