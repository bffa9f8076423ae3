"""Modules that compute natively what a module of other people computed through PyTorch.

Each is a program of one or a few ops, which reads and writes the tensors where they lie.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sylvan.kernels.api import Value
from sylvan.kernels.native.binding import Run
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.sheet import padded

MOST_ROWS = 512
"""Of one call whose rows must be copied, or that keeps some between its ops."""


@dataclass(frozen=True, slots=True)
class Native:
    """A program from the rows of `x` to those of `out`.

    `tile`: its first op reads multiples of so many rows. `single`: it is one op, so that it keeps
    nothing and takes any number of rows.
    """

    program: Program
    x: Value
    out: Value
    dtype: torch.dtype
    tile: int = 1
    single: bool = True


class NativeRows(nn.Module):
    """Turns rows of K columns into rows of N, none of which depends on another in any bit.

    What else is asked of it the module answers that it stands for.
    """

    def __init__(self, module: nn.Module, native: Native) -> None:
        super().__init__()
        self._stands_for = (module,)  # no child: its matrices have no contents any more
        program, x, out = native.program, native.x, native.out
        self._native = native
        self._x, self._out = program.number(x), program.number(out)
        self._room_TK = program.read(x, MOST_ROWS)  # zeros behind its columns
        self._cols, self._padded = out.cols, padded(out.cols)
        self._unpadded = padded(x.cols) == x.cols

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_stands_for" not in self.__dict__:
                raise
            return getattr(self._stands_for[0], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., K) -> (..., N)."""
        native = self._native
        rows_TK = x.reshape(-1, native.x.cols)
        count, dtype = len(rows_TK), native.dtype
        out_TN = torch.empty(count, self._padded, dtype=dtype)
        in_place = self._unpadded and rows_TK.dtype == dtype and rows_TK.is_contiguous()
        in_place = in_place and not count % native.tile
        if in_place and (native.single or count <= MOST_ROWS):
            self._turn(rows_TK, out_TN)
        else:
            for first in range(0, count, MOST_ROWS):
                part_TK = rows_TK[first : first + MOST_ROWS]
                if not in_place:
                    part_TK = self._room_TK[: len(part_TK)].copy_(part_TK)
                self._turn(part_TK, out_TN[first:])
        if self._padded != self._cols:
            out_TN = out_TN[:, : self._cols].contiguous()
        return out_TN.to(x.dtype).view(*x.shape[:-1], self._cols)

    def _turn(self, rows_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        program = self._native.program
        program.bind(self._x, rows_TK.data_ptr())
        program.bind(self._out, out_TN.data_ptr())
        program.run(Run(tokens=len(rows_TK)))


class NativeLinear(NativeRows):
    """Stands for an `nn.Linear`, whose weight has no contents any more."""


class NativeNorm(NativeRows):
    """Stands for an RMSNorm, which still takes rows of other types than the model's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., K), as it is."""
        return super().forward(x) if x.dtype == self._native.dtype else self._stands_for[0](x)


class NativeEmbedding(nn.Module):
    """Stands for an embedding whose table is the packed weight of a head.

    The rows of a step are looked up natively; what the embedding does besides, such as scaling
    them, it does itself, with these rows for its table.
    """

    def __init__(self, table: nn.Embedding, native: Native) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        # Models take their device from their first parameter, and the weight has no contents.
        self.place = nn.Parameter(torch.empty(0, dtype=native.dtype), requires_grad=False)
        self.weight = table.weight
        self.table = table
        table.padding_idx = None  # of gradients only
        self._native, self._out = native, native.program.number(native.out)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Shape: (...) -> (..., K)."""
        ids_T = ids.reshape(-1).to(torch.int32).contiguous()
        rows_TK = torch.empty(len(ids_T), padded(self.embedding_dim))  # float32: exact
        self._native.program.bind(self._out, rows_TK.data_ptr())
        self._native.program.run(Run(tokens=len(ids_T), ids=ids_T.data_ptr()))
        rows_TK = rows_TK[:, : self.embedding_dim].to(self._native.dtype)
        return _look_up(self.table, rows_TK, torch.arange(len(ids_T)).view(ids.shape))


def only_looks_up(table: nn.Embedding) -> bool:
    """Whether rows and their places are all that an embedding goes by, which is tried."""
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
    """What an embedding makes of some ids if these rows are its table."""
    weight = table.weight
    table.weight = nn.Parameter(rows, requires_grad=False)
    try:
        return table(ids)
    finally:
        table.weight = weight
