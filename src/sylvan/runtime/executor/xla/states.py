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
    """Implements `StatePool`; `XlaPages` moves its slots as pages.

    Attributes:
        arrays: All slots of each part (S, ...), by number; None in place of a page's values.
        page_size: 1: a slot counts as a page of one token.
    """

    page_size = 1

    def __init__(self, sizes: StateSizes, mesh: Mesh) -> None:
        """Fill all slots with zeros, on every device."""
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
        """Empty: states are no tensors on the host."""
        return ()

    @property
    def pages(self) -> PageMemory:
        """The memory of the states, a page per slot."""
        return XlaPages(self, range(len(self.arrays)), self.num_slots + self.num_branches)

    def part(self, index: int) -> Any:
        """Not supported: compiled steps read and write the arrays."""
        raise NotImplementedError("recurrent states on JAX cannot be read as tensors")

    def copy(self, source: int, target: int) -> None:
        """Copy all parts of one slot into another."""
        self._copies.run([(0, source, target)])

    def copy_pages(self, layers: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots, one after another."""
        del layers
        self._copies.run([(0, *pair) for pair in copies])


def _zeros(size: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.zeros(size, dtype)
