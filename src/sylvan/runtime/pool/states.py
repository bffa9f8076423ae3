"""Recurrent states of running requests and of cached prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.transfers import Transfers

_ALIGN = 64  # bytes, at which each part of a slot begins


class TensorStates:
    """Implements `StatePool`: one buffer, in which the parts of a slot lie one after another.

    So a slot is one region: it is copied and exported at once, whatever the number of layers.
    """

    def __init__(
        self,
        parts: Sequence[tuple[tuple[int, ...], torch.dtype]],
        num_slots: int,
        device: torch.device | str = "cpu",
        transfers: Transfers | None = None,
    ) -> None:
        """`parts` are the shape and type of each; all slots begin as zeros."""
        self.num_slots = num_slots
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
        steps = [-(-size // _ALIGN) * _ALIGN for size in sizes]
        whole = torch.zeros(num_slots, sum(steps), dtype=torch.uint8, device=device)
        self._parts = [
            piece[:, :size].view(dtype).unflatten(1, shape)
            for piece, size, (shape, dtype) in zip(whole.split(steps, 1), sizes, parts, strict=True)
        ]
        self.memory = PagedBuffer(whole[None], 1, transfers=transfers)

    def part(self, index: int) -> torch.Tensor:
        """See `StatePool.part`."""
        return self._parts[index]

    def copy(self, source: int, target: int) -> None:
        """See `StatePool.copy`."""
        self.memory.copy_tokens([(source, target, 1)])
