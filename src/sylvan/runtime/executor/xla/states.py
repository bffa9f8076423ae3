"""Recurrent states as JAX arrays, which each step consumes and returns.

Shapes: S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.xla.values import Pages
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.parts import StateSizes
from sylvan.runtime.executor.xla.copies import PageCopies
from sylvan.runtime.executor.xla.pool import XlaPages


class XlaStates:
    """Implements `StatePool`, and holds the arrays that `XlaPages` moves: slots are its pages.

    Attributes:
        arrays: All slots of each part (S, ...), by number; None where pages have values.
        page_size: Of one token.
    """

    page_size = 1

    def __init__(self, sizes: StateSizes, mesh: Mesh) -> None:
        """All slots begin as zeros, on every device."""
        self.num_slots, self.num_branches = sizes.slots, sizes.branches
        whole = NamedSharding(mesh, PartitionSpec())
        count = sizes.slots + sizes.branches
        make = jax.jit(_zeros, static_argnums=(0, 1), out_shardings=whole)
        self.arrays: dict[int, Pages] = {
            number: (make((count, *shape), str(dtype).removeprefix("torch.")), None)
            for number, (shape, dtype) in enumerate(sizes.parts)
        }
        self._copies = PageCopies(self.arrays, range(len(sizes.parts)), mesh)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Empty: no tensors of the host."""
        return ()

    @property
    def pages(self) -> PageMemory:
        """The same memory by slots."""
        return XlaPages(self, range(len(self.arrays)), self.num_slots + self.num_branches)

    def part(self, index: int) -> Any:
        """Not offered: steps read and write the arrays."""
        raise NotImplementedError("states of JAX cannot be read as tensors")

    def copy(self, source: int, target: int) -> None:
        """Copy all parts of one slot into another."""
        self._copies.run([(0, source, target)])

    def copy_pages(self, layers: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots, one after another."""
        del layers
        self._copies.run([(0, *pair) for pair in copies])


def _zeros(size: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.zeros(size, dtype)
