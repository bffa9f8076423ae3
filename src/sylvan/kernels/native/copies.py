"""What a program keeps of a weight: to be read back, and written over in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sylvan.kernels.api import LinearWeight, Unsupported
from sylvan.kernels.matmul.pack import PackedWeight, PackKind, repack
from sylvan.kernels.matmul.unpack import unpack, unpack_stack
from sylvan.kernels.matmul.weights import Int4Weight, Int8Weight
from sylvan.kernels.memory import Bytes

Content = torch.Tensor | Int8Weight | Int4Weight


@dataclass(frozen=True, slots=True)
class Form:
    """Kind of a matrix and, of int4, the inputs that share a scale."""

    kind: PackKind = "dense"
    group: int = 0


DENSE = Form()


def form_of(content: Content) -> Form:
    """How contents are kept."""
    if isinstance(content, Int8Weight):
        return Form("int8")
    return Form("int4", content.group) if isinstance(content, Int4Weight) else DENSE


class WeightCopy(Protocol):
    """A copy of a tensor, or of a `DeferredWeight` (known by its key), in a program's memory."""

    @property
    def source(self) -> object:
        """What was traced."""
        ...

    @property
    def form(self) -> Form:
        """How its numbers are kept."""
        ...

    @property
    def memory(self) -> tuple[Bytes, ...]:
        """Where it lies."""
        ...

    def read(self) -> Content | None:
        """What was written last, in new tensors; None: it cannot be told from the copy."""
        ...

    def write(self, content: Content) -> None:
        """Put other contents of the same kind and shape there; no step may run meanwhile.

        Raises:
            Unsupported: they are of another kind or shape.
        """
        ...


@dataclass(frozen=True, slots=True)
class MatrixCopy:
    """A matrix or a stack in kernel order; `derive` makes it of `source`, where they differ."""

    source: object
    packed: PackedWeight
    count: int  # of a stack; 0: one matrix
    dtype: torch.dtype
    derive: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def form(self) -> Form:
        """See `WeightCopy.form`."""
        return Form(self.packed.kind, self.packed.group)

    @property
    def memory(self) -> tuple[Bytes, ...]:
        """See `WeightCopy.memory`."""
        parts = self.packed.data, self.packed.scale, self.packed.sums
        return tuple(part for part in parts if part is not None)

    def read(self) -> Content | None:
        """See `WeightCopy.read`."""
        if self.derive is not None:
            return None
        if self.count:
            return unpack_stack(self.packed, self.count, self.dtype)
        return unpack(self.packed, self.dtype)

    def write(self, content: Content) -> None:
        """See `WeightCopy.write`."""
        weight: LinearWeight = content
        if self.derive is not None:
            if not isinstance(content, torch.Tensor):
                raise Unsupported("a quantised matrix in the place of one that others are made of")
            weight = self.derive(content)
        repack(weight, self.packed, self.dtype)


@dataclass(frozen=True, slots=True)
class VectorCopy:
    """Numbers as float32, plus `offset`: vectors, and the rows of biases (each padded)."""

    source: object
    data: Bytes
    shape: torch.Size
    width: int  # numbers from one row to the next; 0: one row
    offset: float = 0.0

    @property
    def form(self) -> Form:
        """See `WeightCopy.form`."""
        return DENSE

    @property
    def memory(self) -> tuple[Bytes, ...]:
        """See `WeightCopy.memory`."""
        return (self.data,)

    def read(self) -> Content | None:
        """See `WeightCopy.read`; an offset cannot be taken away exactly."""
        return None if self.offset else self.numbers().clone().view(self.shape)

    def write(self, content: Content) -> None:
        """See `WeightCopy.write`."""
        if not isinstance(content, torch.Tensor) or content.shape != self.shape:
            raise Unsupported(f"contents of another shape than {list(self.shape)}")
        rows = self.numbers()
        rows.copy_(content.detach().float().view(rows.shape) + self.offset)

    def numbers(self) -> torch.Tensor:
        """What programs read: a view (rows, cols) without padding."""
        numbers, count = torch.from_numpy(self.data.view(np.float32)), self.shape.numel()
        if not self.width:
            return numbers[:count][None]
        cols = self.shape[-1]
        return numbers.view(-1, self.width)[: count // cols, :cols]
