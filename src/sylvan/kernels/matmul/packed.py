"""A weight in the order kernels read it; `pack` makes it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from sylvan.kernels.matmul.weights import DENSE, Form, PackKind
from sylvan.kernels.memory import Bytes

LANES = 16


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in kernel order; `words` are 32-bit words of inputs in a block of 16 outputs."""

    kind: PackKind
    rows: int  # outputs
    cols: int  # inputs
    padded_rows: int
    words: int
    data: Bytes
    scale: Bytes | None = None
    sums: Bytes | None = None
    zeros: Bytes | None = None
    shifts: Bytes | None = None
    order: Bytes | None = None
    group: int = 0  # inputs that kernels multiply by one scale
    form: Form = DENSE

    @property
    def num_bytes(self) -> int:
        """Memory that is read when multiplying."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def parts(self) -> dict[str, Bytes]:
        """Its memory, by the names of attributes."""
        found = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: part for name, part in found.items() if isinstance(part, np.ndarray)}

    def one_of(self, index: int, count: int) -> PackedWeight:
        """One of a stack of `count`, over the same memory."""
        cut = {
            name: part[index * (part.nbytes // count) : (index + 1) * (part.nbytes // count)]
            for name, part in self.parts.items()
        }
        return replace(self, **cut)
