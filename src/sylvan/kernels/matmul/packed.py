"""A weight in kernel order, as made by `pack`."""

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
    steps: Bytes | None = None
    order: Bytes | None = None
    group: int = 0  # inputs that kernels multiply by one scale
    form: Form = DENSE

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def parts(self) -> dict[str, Bytes]:
        """The arrays, by attribute name."""
        found = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: part for name, part in found.items() if isinstance(part, np.ndarray)}

    def one_of(self, index: int, count: int) -> PackedWeight:
        """One matrix of a stack of `count`, sharing its memory."""
        cut = {
            name: part[index * (part.nbytes // count) : (index + 1) * (part.nbytes // count)]
            for name, part in self.parts.items()
        }
        return replace(self, **cut)
