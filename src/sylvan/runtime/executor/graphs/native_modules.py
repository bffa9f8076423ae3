"""Native replacements for modules of the transformers library.

Each is a program of one or a few ops that reads and writes tensors in place.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sylvan.kernels.api import TracedTensor
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.builder import padded
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.program import Program

MAX_ROWS = 2048
"""Maximum rows per call, if rows must be copied or kept between ops.

Larger calls read expert weights less often: 1.2 times as fast as 512 on 2,048 rows.
"""


_TILE_ROWS = 16  # rows per matrix tile


@dataclass(frozen=True, slots=True)
class RowProgram:
    """A program that maps the rows of `x` to the rows of `out`.

    `tile`: its first op reads multiples of this many rows. `single`: it has one op, so it keeps no
    intermediate results and takes any number of rows. `buffer` (MAX_ROWS, padded K): zero-padded
    buffer for rows that cannot be read in place; None to read `x` in place.
    """

    program: Program
    x: TracedTensor
    out: TracedTensor
    dtype: torch.dtype
    tile: int = 1
    single: bool = True
    buffer: torch.Tensor | None = None


def tile_rows(library: Library, dtype: torch.dtype) -> int:
    """Number of rows that a product of this type reads at once, even if fewer are used."""
    return _TILE_ROWS if library.variant == "amx" and dtype == torch.bfloat16 else 1


class NativeRowsModule(nn.Module):
    """Maps rows of K columns to rows of N; each row is independent of the others, bit for bit.

    Other attributes are delegated to the wrapped module.
    """

    def __init__(self, module: nn.Module, native: RowProgram) -> None:
        super().__init__()
        self._wrapped = (module,)  # not a child module: its matrices are freed
        program, x, out = native.program, native.x, native.out
        self._program, self._dtype, self._tile = program, native.dtype, native.tile
        self._made = torch.float32 if out.dtype == "f32" else native.dtype
        # float32 results even if the module's rows have another type
        self._widens = self._made != native.dtype
        self._x, self._out = program.number(x), program.number(out)
        buffer = program.read(x, MAX_ROWS) if native.buffer is None else native.buffer
        self._buffer_TK = buffer[:, : x.cols]  # its padding columns stay zero
        self._in, self._cols, self._padded = x.cols, out.cols, padded(out.cols)
        self._unpadded = padded(x.cols) == x.cols
        self._most = sys.maxsize if native.single else MAX_ROWS  # rows of one call
        self._step = StepRun()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_wrapped" not in self.__dict__:
                raise
            return getattr(self._wrapped[0], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., K) -> (..., N)."""
        return self._computed(x)

    def _computed(self, x: torch.Tensor, *beside: tuple[int, torch.Tensor]) -> torch.Tensor:
        """Compute the result. `beside`: further inputs per row, by number of the traced value."""
        count, given = x.numel() // self._in, x.dtype == self._dtype
        in_place = self._unpadded and given and not count % self._tile and x.is_contiguous()
        if self._padded != self._cols or count > (self._most if in_place else MAX_ROWS):
            return self._in_parts(x, beside)
        rows = x if in_place else self._buffer_TK[:count].copy_(x.reshape(-1, self._in))
        out = torch.empty((*x.shape[:-1], self._cols), dtype=self._made)
        self._step.tokens = count
        places = (self._x, rows.data_ptr()), (self._out, out.data_ptr())
        if beside:
            places += tuple((number, others.data_ptr()) for number, others in beside)
        self._program.run_at(self._step, *places)
        return out if given or self._widens else out.to(x.dtype)

    def _in_parts(
        self, x: torch.Tensor, beside: Sequence[tuple[int, torch.Tensor]]
    ) -> torch.Tensor:
        """As `_computed`, but in parts: too many rows for one call, or padded results."""
        rows_TK = x.reshape(-1, self._in)
        count = len(rows_TK)
        out_TN = torch.empty(count, self._padded, dtype=self._made)
        in_place = self._unpadded and rows_TK.dtype == self._dtype and rows_TK.is_contiguous()
        in_place = in_place and not count % self._tile
        most = self._most if in_place else MAX_ROWS
        for first in range(0, count, most):
            part_TK = rows_TK[first : first + most]
            if not in_place:
                part_TK = self._buffer_TK[: len(part_TK)].copy_(part_TK)
            self._step.tokens = len(part_TK)
            parts = (self._x, part_TK), (self._out, out_TN[first:])
            parts += tuple((number, rows[first:]) for number, rows in beside)
            self._program.run_at(self._step, *((number, rows.data_ptr()) for number, rows in parts))
        if self._padded != self._cols:
            out_TN = out_TN[:, : self._cols].contiguous()
        return out_TN.to(self._made if self._widens else x.dtype).view(*x.shape[:-1], self._cols)


class NativeExperts(NativeRowsModule):
    """Replaces routed experts: each row gets expert ids and routing weights.

    Shapes: T rows, K columns, C experts of a row.
    """

    def __init__(
        self,
        module: nn.Module,
        native: RowProgram,
        choice: tuple[TracedTensor, TracedTensor],
        num_experts: int,
    ) -> None:
        super().__init__(module, native)
        self._names = tuple(inspect.signature(module.forward).parameters)
        self._ids, self._shares = map(native.program.number, choice)
        self._top_k, self._num_experts = choice[0].cols, num_experts

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Rows (T, K), expert ids (T, C) and routing weights (T, C), named as in its module.

            Returns: (T, K).

        Raises:
            IndexError: an expert id is out of range; kernels would write out of bounds.
        """
        x, ids, shares = (*args, *(kwargs[name] for name in self._names[len(args) :]))
        ids_TC = ids.to(torch.int32).contiguous()
        shares_TC = shares.to(torch.float32).contiguous()
        if not ids_TC.shape == shares_TC.shape == (len(x), self._top_k):
            raise IndexError(
                f"expert ids of shape {tuple(ids.shape)} with routing weights of shape "
                f"{tuple(shares.shape)}"
            )
        numbers = ids_TC.numpy().view(np.uint32)  # negative ids become large
        if numbers.size and numbers.max() >= self._num_experts:
            raise IndexError(f"expert ids must be in 0..{self._num_experts - 1}")
        return self._computed(x, (self._ids, ids_TC), (self._shares, shares_TC))


class NativeLinear(NativeRowsModule):
    """Replaces an `nn.Linear`, whose weight has been freed."""


class NativeNorm(NativeRowsModule):
    """Replaces an RMSNorm; PyTorch still handles rows of other types than the model's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., K) -> (..., K)."""
        return self._computed(x) if x.dtype == self._dtype else self._wrapped[0](x)


class NativeEmbedding(nn.Module):
    """Replaces an embedding whose table is the packed weight of a head.

    Native code looks up the rows of a step; the original embedding then does the rest, such as
    scaling, with these rows as its table.
    """

    def __init__(self, table: nn.Embedding, native: RowProgram) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        # Models take their device from their first parameter, and the freed weight has none.
        self.place = nn.Parameter(torch.empty(0, dtype=native.dtype), requires_grad=False)
        self.weight = table.weight
        self.table = table
        table.padding_idx = None  # only affects gradients
        self._native, self._out = native, native.program.number(native.out)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Shape: (...) -> (..., K)."""
        ids_T = ids.reshape(-1).to(torch.int32).contiguous()
        rows_TK = torch.empty(len(ids_T), padded(self.embedding_dim), dtype=torch.float32)  # exact
        self._native.program.bind(self._out, rows_TK.data_ptr())
        self._native.program.run(StepRun(tokens=len(ids_T), ids=ids_T.data_ptr()))
        rows_TK = rows_TK[:, : self.embedding_dim].to(self._native.dtype)
        return _look_up(self.table, rows_TK, torch.arange(len(ids_T)).view(ids.shape))


def only_looks_up(table: nn.Embedding) -> bool:
    """Whether the embedding's result depends only on its rows; tested numerically."""
    if table.max_norm is not None or table.num_embeddings < 3:
        return False
    padding, table.padding_idx = table.padding_idx, None
    ids = torch.tensor([[table.num_embeddings - 1, 0, 1]])
    with torch.inference_mode():
        rows = table.weight[ids[0]]
        same = torch.equal(_look_up(table, rows, torch.arange(3)[None]), table(ids))
    table.padding_idx = padding
    return same


def _look_up(table: nn.Embedding, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Run an embedding with these rows as its table."""
    weight = table.weight
    table.weight = nn.Parameter(rows, requires_grad=False)
    try:
        return table(ids)
    finally:
        table.weight = weight
