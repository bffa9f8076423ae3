"""Copies of weights in a program: to read back, and to overwrite in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sylvan.kernels.api import LinearWeight, Unsupported
from sylvan.kernels.matmul.pack import repack
from sylvan.kernels.matmul.packed import PackedWeight
from sylvan.kernels.matmul.unpack import unpack, unpack_stack
from sylvan.kernels.matmul.weights import DENSE, Form, QuantisedWeight
from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.packing import can_pack, repack_rows

Content = torch.Tensor | QuantisedWeight


class WeightCopy(Protocol):
    """A copy of a tensor, or of a `DeferredWeight` (known by its key), in a program's memory."""

    @property
    def source(self) -> object:
        """The traced weight."""
        ...

    @property
    def form(self) -> Form:
        """Storage form of its numbers."""
        ...

    @property
    def memory(self) -> tuple[Bytes, ...]:
        """Its memory."""
        ...

    def read(self) -> Content | None:
        """Return the last written contents in new tensors; None if they cannot be read back."""
        ...

    def write(self, content: Content) -> None:
        """Overwrite it with contents of the same kind and shape; no step may run meanwhile.

        Raises:
            Unsupported: the contents have another kind or shape.
        """
        ...

    @property
    def takes_rows(self) -> bool:
        """Whether `write_rows` may be called."""
        ...

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool:
        """Overwrite rows from `first` on with unquantised numbers, rounded like the copy.

        Rows of a stack are counted over all of its matrices. No step may run meanwhile.

            Returns: whether all numbers are finite; else the written rows are invalid.
        """
        ...


@dataclass(frozen=True, slots=True)
class MatrixCopy:
    """A matrix or a stack in kernel order; `derive` computes it from `source`, if they differ."""

    source: object
    packed: PackedWeight
    count: int  # of a stack; 0: one matrix
    dtype: torch.dtype
    derive: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def form(self) -> Form:
        return self.packed.form

    @property
    def memory(self) -> tuple[Bytes, ...]:
        return tuple(self.packed.parts.values())

    def read(self) -> Content | None:
        if self.derive is not None:
            return None
        if self.count:
            return unpack_stack(self.packed, self.count, self.dtype)
        return unpack(self.packed, self.dtype)

    def write(self, content: Content) -> None:
        weight: LinearWeight = content
        if self.derive is not None:
            if not isinstance(content, torch.Tensor):
                raise Unsupported("a quantised matrix from which other copies are derived")
            weight = self.derive(content)
        repack(weight, self.packed, self.dtype)

    @property
    def takes_rows(self) -> bool:
        return self.derive is None and can_pack(self.packed.kind)

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool:
        dense = self.packed.kind == "dense"
        known = self.dtype if dense or rows_NK.dtype == torch.bfloat16 else torch.float32
        numbers = rows_NK.to(known)
        return repack_rows(numbers, self.packed, first, self.count or 1)


@dataclass(frozen=True, slots=True)
class VectorCopy:
    """Float32 copies plus `offset`: vectors, and rows of biases (each padded)."""

    source: object
    data: Bytes
    shape: torch.Size
    width: int  # numbers from one row to the next; 0: one row
    offset: float = 0.0

    @property
    def form(self) -> Form:
        return DENSE

    @property
    def memory(self) -> tuple[Bytes, ...]:
        return (self.data,)

    def read(self) -> Content | None:
        """Return None if there is an offset, which cannot be subtracted exactly."""
        return None if self.offset else self.numbers().clone().view(self.shape)

    def write(self, content: Content) -> None:
        if not isinstance(content, torch.Tensor) or content.shape != self.shape:
            raise Unsupported(f"contents of another shape than {list(self.shape)}")
        rows = self.numbers()
        rows.copy_(content.detach().float().view(rows.shape) + self.offset)

    @property
    def takes_rows(self) -> bool:
        """Return False: vectors are small and only written as a whole."""
        return False

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool:
        raise Unsupported("writing single rows of vectors")

    def numbers(self) -> torch.Tensor:
        """Return the memory that programs read, as a view (rows, cols) without padding."""
        numbers, count = torch.from_numpy(self.data.view(np.float32)), self.shape.numel()
        if not self.width:
            return numbers[:count][None]
        cols = self.shape[1:].numel()
        return numbers.view(-1, self.width)[: count // cols, :cols]
