"""Sums short messages through symmetric memory, which all GPUs of a machine can address.

GPUs reach it by NVLink or PCIe; `torch.distributed` allocates it. Never run on several devices.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sylvan.kernels.collective.gloo import part_of_store
from sylvan.kernels.collective.triton_sum import (
    ONE_SHOT_BYTES,
    PROGRAMS,
    PeerBuffers,
    one_shot,
    two_shot,
)

BUFFER_NUMBERS = 1 << 20
"""Size of a rank's buffer in float32 numbers; NCCL sums messages beyond 4 MB."""
_SYMMETRIC_MEMORY = "_SymmetricMemory"


class SymmetricAllReduce:
    """Sums messages that fit into a buffer.

    Args:
        memory: This rank's buffer, followed by its signal pad; kept alive here.
        buffers: Addresses of all ranks' buffers and pads.
    """

    def __init__(self, memory: torch.Tensor, buffers: PeerBuffers) -> None:
        self._memory, self._rooms = memory, buffers

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is short enough."""
        return 0 < x.numel() <= self._rooms.capacity

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_sum`."""
        flat = x.contiguous().view(-1)
        way = one_shot if flat.nbytes <= ONE_SHOT_BYTES else two_shot
        return way(flat, self._rooms).view(x.shape)


def symmetric_all_reduce(
    store: Any, name: str, rank: int, size: int, device: torch.device
) -> SymmetricAllReduce:
    """Allocate this rank's buffer, and exchange addresses with the other ranks.

    Args:
        store: Store through which the ranks find each other.
        name: Name of the group, unique in this process.
        rank: Rank of this process.
        size: Number of ranks.
        device: The GPU of this rank.

    Raises:
        RuntimeError: The driver, the links or this torch do not support symmetric memory.
    """
    memory: Any = getattr(
        importlib.import_module("torch._C._distributed_c10d"), _SYMMETRIC_MEMORY, None
    )
    if memory is None:
        raise RuntimeError(f"torch {torch.__version__} does not support it")
    memory.set_group_info(name, rank, size, part_of_store(store, "symmetric"))
    numbers = BUFFER_NUMBERS + PROGRAMS * size  # with the pad of signals
    buffer: torch.Tensor = memory.empty_strided_p2p((numbers,), (1,), torch.float32, device, name)
    buffer.zero_()
    torch.cuda.synchronize(device)  # zeros must be written before the first signal arrives
    handle = memory.rendezvous(buffer, name)
    addresses = [handle.get_buffer(r, (numbers,), torch.float32).data_ptr() for r in range(size)]
    buffers_N = torch.tensor(addresses, dtype=torch.int64, device=device)
    return SymmetricAllReduce(
        buffer, PeerBuffers(buffers_N, buffers_N + 4 * BUFFER_NUMBERS, rank, BUFFER_NUMBERS)
    )
