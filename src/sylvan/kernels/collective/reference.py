"""Reference in PyTorch, and a group whose ranks are threads of one process.

Shapes: P parts, T rows, N columns.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from sylvan.kernels.api import Communicator, RowParts
from sylvan.protocol.errors import RankLostError


def tree_sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension: neighbours in pairs, then pairs of pairs. Shape: (P, ...).

    If P is a power of two, each aligned half has its own sub-tree. So 1, 2, 4, ... ranks may add up
    their parts first, and the bits stay the same.
    """
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        sums = parts[0:even:2] + parts[1:even:2]
        parts = torch.cat((sums, parts[even:])) if even < len(parts) else sums
    return parts[0]


def all_reduce(
    x: torch.Tensor, ranks: Communicator, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    total = ranks.all_sum(x.float())
    return (total if bias is None else total + bias.float()).to(dtype)


def all_gather(x: torch.Tensor, ranks: Communicator, cols: int) -> torch.Tensor:
    if ranks.size == 1:
        return x
    share = -(-cols // ranks.size)
    parts = ranks.all_gather(F.pad(x, (0, share - x.shape[-1])))
    return parts.movedim(0, -2).flatten(-2)[..., :cols].contiguous()


def reduce_scatter(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    if ranks.size == 1:
        return x
    parts = ranks.all_to_all(x.float().unflatten(0, (ranks.size, -1)))
    return tree_sum(parts).to(x.dtype)


def all_to_all(x: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    if ranks.size == 1:
        return x
    return ranks.all_to_all(x.unflatten(0, (ranks.size, -1))).flatten(0, 1)


def mean_of_squares(x: torch.Tensor, over: RowParts | None) -> torch.Tensor:
    """Mean square of each row of x, or of the longer row it is part of. Shape: (T, N) -> (T, 1)."""
    squares = x.float().square()
    if over is None:
        return squares.mean(-1, keepdim=True)
    total = over.ranks.all_sum(squares.sum(-1, keepdim=True))
    return total / (x.shape[-1] * over.ranks.size)


@dataclass(slots=True)
class _ExchangeBuffers:
    """Buffers in which the threads of a group exchange tensors; exchange n uses buffer n % 2."""

    buffers: list[list[torch.Tensor]]
    numbers: list[int]  # newest exchange of each rank
    timeout_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: set[int] = field(default_factory=set[int])


class ThreadRanks:
    """Implements `Communicator`; made by `thread_ranks`."""

    def __init__(self, rank: int, size: int, shared: _ExchangeBuffers) -> None:
        self.rank, self.size = rank, size
        self._shared = shared

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        given = self._exchange(x)
        if any(other.shape != x.shape or other.dtype != x.dtype for other in given):
            shapes = ", ".join(f"{list(other.shape)} {other.dtype}" for other in given)
            raise RankLostError(f"ranks gather tensors of different shapes: {shapes}")
        return torch.stack(given)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([other[self.rank] for other in self._exchange(x)])

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        return tree_sum(self.all_gather(x))

    def check(self) -> None:
        """Do nothing: no native program runs collectives."""

    def close(self) -> None:
        """Leave the group; ranks that wait for this one get RankLostError."""
        with self._shared.changed:
            self._shared.closed.add(self.rank)
            self._shared.changed.notify_all()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        shared = self._shared
        with shared.changed:
            number = shared.numbers[self.rank] + 1
            shared.buffers[self.rank][number % 2] = x.clone()
            shared.numbers[self.rank] = number
            shared.changed.notify_all()
            for other in range(self.size):
                self._wait(other, number)
            return [buffers[number % 2] for buffers in shared.buffers]

    def _wait(self, other: int, number: int) -> None:
        shared = self._shared

        def is_over() -> bool:
            return shared.numbers[other] >= number or other in shared.closed

        if not shared.changed.wait_for(is_over, shared.timeout_s):
            raise RankLostError(f"rank {other} did not arrive within {shared.timeout_s:g} s")
        if shared.numbers[other] < number:
            raise RankLostError(f"rank {other} has exited")


def thread_ranks(size: int, timeout_s: float = 60.0) -> tuple[ThreadRanks, ...]:
    """Return a group of `size` ranks, one communicator per thread."""
    buffers = [[torch.empty(0), torch.empty(0)] for _ in range(size)]
    shared = _ExchangeBuffers(buffers, [0] * size, timeout_s)
    return tuple(ThreadRanks(rank, size, shared) for rank in range(size))
