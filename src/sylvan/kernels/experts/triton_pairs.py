"""Shared by grouped products of experts: the tile of a program, and storing its sums.

Shapes: P pairs of a row and an expert, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import ActivationKind, Clamping
from sylvan.kernels.experts.triton_places import ExpertTiles
from sylvan.kernels.gating.triton_gating import clamp_arguments, gated

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


def pair_arguments(
    rows: PairRows, bias: torch.Tensor | None, gate: ExpertGate | None
) -> dict[str, Any]:
    """Arguments of a product's kernel that do not depend on the form of its weights, by name."""
    alpha, limit, form = clamp_arguments(None if gate is None else gate.clamping)
    return {
        "pair_ptr": rows.places.pairs,
        "owner_ptr": rows.places.owners,
        "row_tiles": rows.places.row_tiles,
        "alpha": alpha,
        "limit": limit,
        "PAIRS_OF_ROW": rows.per_row,
        "BIAS": bias is not None,
        "GATE": "" if gate is None else gate.act,
        "CLAMP": form,
    }


@triton.jit
def pairs_of_tile(pair_ptr, owner_ptr, row_tiles, outputs, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Expert of this program's tile (below 0: none), pairs, which are real, and column tile."""
    program = tl.program_id(0)
    in_group = _GROUP * ((outputs + COLS - 1) // COLS)
    first_tile = program // in_group * _GROUP
    group_tiles = tl.minimum(row_tiles - first_tile, _GROUP)
    row_tile = first_tile + program % in_group % group_tiles
    expert = tl.load(owner_ptr + row_tile)
    placed = tl.load(pair_ptr + row_tile * ROWS + tl.arange(0, ROWS))
    return expert, tl.maximum(placed, 0), placed >= 0, program % in_group // group_tiles


@triton.jit
def feature_of(col, outputs, GATE: tl.constexpr):
    """The output of the weight that a column of the product is.

    With a GATE column 2i is a gate, and column 2i + 1 what it is multiplied by.
    """
    return col // 2 + col % 2 * (outputs // 2) if GATE != "" else col


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

    Columns as in `feature_of`.
    """
    col = col_tile * COLS + tl.arange(0, COLS)
    wanted, row = col < outputs, pair.to(tl.int64)[:, None]
    if BIAS:
        bias_at = bias_ptr + expert * outputs + feature_of(col, outputs, GATE)
        bias = tl.load(bias_at, mask=wanted, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    y = acc.to(y_ptr.dtype.element_ty)
    if GATE != "":
        gate, up = tl.split(tl.reshape(y.to(tl.float32), [ROWS, COLS // 2, 2]))
        passed = gated(gate, up, alpha, limit, GATE, CLAMP).to(y_ptr.dtype.element_ty)
        out = col_tile * (COLS // 2) + tl.arange(0, COLS // 2)
        out_at = y_ptr + row * (outputs // 2) + out[None, :]
        tl.store(out_at, passed, mask=real[:, None] & (out < outputs // 2)[None, :])
    else:
        y_at = y_ptr + row * outputs + col[None, :]
        tl.store(y_at, y, mask=real[:, None] & wanted[None, :])
