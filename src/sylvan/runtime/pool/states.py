"""Recurrent states of running requests and of cached prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.pool.state_pages import StatePages


class TensorStates:
    """Implements `StatePool` with plain tensors."""

    def __init__(
        self,
        parts: Sequence[tuple[tuple[int, ...], torch.dtype]],
        num_slots: int,
        device: torch.device | str = "cpu",
        num_branches: int = 0,
    ) -> None:
        """`parts` are shapes and dtypes; all slots are zero at first."""
        self.num_slots, self.num_branches = num_slots, num_branches
        count = num_slots + num_branches
        self._parts = [
            torch.zeros((count, *shape), dtype=dtype, device=device) for shape, dtype in parts
        ]

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All slots of all parts."""
        return tuple(self._parts)

    @property
    def pages(self) -> PageMemory:
        """The same memory by slots."""
        return StatePages(self._parts)

    def part(self, index: int) -> torch.Tensor:
        return self._parts[index]

    def copy(self, source: int, target: int) -> None:
        for part in self._parts:
            part[target] = part[source]


class QueuedStates:
    """Implements `StatePool` on a device: copies run in its queue, in call order.

    Args:
        states: The memory.
    """

    def __init__(self, states: TensorStates) -> None:
        self._states = states
        self._due: list[tuple[int, int]] = []
        self.num_slots, self.num_branches = states.num_slots, states.num_branches

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All slots of all parts."""
        return self._states.parts

    def part(self, index: int) -> torch.Tensor:
        return self._states.part(index)

    def copy(self, source: int, target: int) -> None:
        self._due.append((source, target))

    def take_copies(self) -> Callable[[], None]:
        """Return work that makes the requested copies; queue it before the next forward pass."""
        due, self._due = self._due, []

        def copy_all() -> None:
            for source, target in due:
                self._states.copy(source, target)

        return copy_all
