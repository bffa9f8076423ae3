"""Shared by grouped products of experts: the tile of a program, and storing its sums.

Shapes: P pairs of a row and an expert, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import ActivationKind, Clamping
from sylvan.kernels.experts.triton_places import ExpertTiles
from sylvan.kernels.gating.triton_gating import gated

_GROUP = tl.constexpr(8)  # row tiles that use a column of weights in turn, for L2 reuse


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """The gated activation: act(gate) * up, within limits or not."""

    act: ActivationKind
    clamping: Clamping | None


@dataclass(frozen=True, slots=True)
class PairRows:
    """Rows of a product: pair p has row p // `per_row` of `x`, times its share if there are any."""

    x: torch.Tensor
    places: ExpertTiles
    per_row: int = 1
    shares: torch.Tensor | None = None

    def apart(self) -> PairRows:
        """The same with a row for each pair, already multiplied by its share."""
        if self.shares is None:
            return self
        x_PD = self.x.repeat_interleave(self.per_row, 0)
        x_PD = (x_PD.float() * self.shares.flatten()[:, None]).to(self.x.dtype)
        return PairRows(x_PD, self.places)

    def outputs(self, columns: int, gate: ExpertGate | None) -> torch.Tensor:
        """An empty result: a row for each pair, of `columns` or of half as many gated ones."""
        columns = columns if gate is None else columns // 2
        return self.x.new_empty(len(self.x) * self.per_row, columns)


@triton.jit
def tile_of(row_tiles, outputs, COLS: tl.constexpr):
    """Tile of rows and tile of columns of this program."""
    program = tl.program_id(0)
    col_tiles = (outputs + COLS - 1) // COLS
    in_group = _GROUP * col_tiles
    first_tile = program // in_group * _GROUP
    group_tiles = tl.minimum(row_tiles - first_tile, _GROUP)
    return first_tile + program % in_group % group_tiles, program % in_group // group_tiles


@triton.jit
def store_pairs(
    acc,
    bias_ptr,
    y_ptr,
    expert,
    pair,
    real,
    col_tile,
    outputs,
    alpha,
    limit,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    CLAMP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store a tile of sums as rows `pair` of y, plus bias, gated if there is a GATE.

    With a GATE column 2i of the tile is a gate, and column 2i + 1 what it is multiplied by.
    """
    col = col_tile * COLS + tl.arange(0, COLS)
    wanted = col < outputs
    if BIAS:
        feature = col // 2 + col % 2 * (outputs // 2) if GATE != "" else col
        bias = tl.load(bias_ptr + expert * outputs + feature, mask=wanted, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    y = acc.to(y_ptr.dtype.element_ty)
    if GATE != "":
        gate, up = tl.split(tl.reshape(y.to(tl.float32), [ROWS, COLS // 2, 2]))
        passed = gated(gate, up, alpha, limit, GATE, CLAMP).to(y_ptr.dtype.element_ty)
        out = col_tile * (COLS // 2) + tl.arange(0, COLS // 2)
        out_at = y_ptr + pair[:, None] * (outputs // 2) + out[None, :]
        tl.store(out_at, passed, mask=real[:, None] & (out < outputs // 2)[None, :])
    else:
        y_at = y_ptr + pair[:, None] * outputs + col[None, :]
        tl.store(y_at, y, mask=real[:, None] & wanted[None, :])
