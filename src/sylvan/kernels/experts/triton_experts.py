"""Mixtures of experts on GPUs: rows put together by expert, then one grouped matrix product.

The way of vLLM's and SGLang's fused MoE: pairs of a row and an expert are given places such that
each tile of rows belongs to one expert; both products run over the tiles of all experts in one
launch; the last kernel sums the experts of a row. How many rows an expert gets never leaves the
device. Places within an expert are taken in any order: a row of a product does not depend on its
place, and the sum over a row's experts is in the order of their numbers.

Shapes: T rows, E experts, K experts of a row, P = T K pairs, D hidden, F inner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import ExpertWeights, LinearWeight, Routing
from sylvan.kernels.experts.routing import route
from sylvan.kernels.gating.triton_gating import clamped_glu, glu
from sylvan.kernels.gpu.launch import arch_of, launch
from sylvan.kernels.gpu.tiles import Tile, ceil_div, power_of_two, tile

_BLOCK = 256
_SUM_BLOCK = 1024
_GROUP = tl.constexpr(8)  # tiles of rows that take a column of weights one after another


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids_ptr, load_ptr, pairs, BLOCK: tl.constexpr):
    """How many pairs each expert has."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=0)
    tl.atomic_add(load_ptr + expert, 1, mask=pair < pairs)


@triton.jit
def _offsets_kernel(
    load_ptr, start_ptr, end_ptr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """First and last place of each expert, whose places are whole tiles."""
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    places = (tl.load(load_ptr + expert, mask=there, other=0) + ROWS - 1) // ROWS * ROWS
    ends = tl.cumsum(places, 0)
    tl.store(start_ptr + expert, ends - places, mask=there)
    tl.store(end_ptr + expert, ends, mask=there)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(ids_ptr, start_ptr, taken_ptr, pair_ptr, pairs, BLOCK: tl.constexpr):
    """Give each pair a place of its expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=real, other=0)
    place = tl.load(start_ptr + expert, mask=real, other=0)
    place += tl.atomic_add(taken_ptr + expert, 1, mask=real)
    tl.store(pair_ptr + place, pair, mask=real)


@triton.jit(do_not_specialize=["row_tiles"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    share_ptr,
    y_ptr,
    pair_ptr,
    start_ptr,
    end_ptr,
    load_ptr,
    row_tiles,
    outputs,
    inputs,
    x_stride,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PAIRS_OF_ROW: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    """A tile of x (rows of pairs) times the weight of the tile's expert, transposed.

    Row `pair // PAIRS_OF_ROW` of x gives row `pair` of y.
    """
    program = tl.program_id(0)
    col_tiles = (outputs + COLS - 1) // COLS
    in_group = _GROUP * col_tiles
    first_tile = program // in_group * _GROUP
    group_tiles = tl.minimum(row_tiles - first_tile, _GROUP)
    row_tile = first_tile + program % in_group % group_tiles
    col_tile = program % in_group // group_tiles
    numbers = tl.arange(0, EXPERT_BLOCK)
    ends = tl.load(end_ptr + numbers, mask=numbers < EXPERTS, other=1 << 30)
    expert = tl.sum((ends <= row_tile * ROWS).to(tl.int32), 0)
    if expert < EXPERTS:
        place = row_tile * ROWS + tl.arange(0, ROWS)
        last = tl.load(start_ptr + expert) + tl.load(load_ptr + expert)
        real = place < last
        pair = tl.load(pair_ptr + place, mask=real, other=0).to(tl.int64)
        col = col_tile * COLS + tl.arange(0, COLS)
        wanted = col < outputs
        k = tl.arange(0, INNER)
        x_at = x_ptr + (pair // PAIRS_OF_ROW)[:, None] * x_stride + k[None, :]
        w_at = weight_ptr + expert.to(tl.int64) * outputs * inputs
        w_at += col.to(tl.int64)[None, :] * inputs + k[:, None]
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, inputs, INNER):
            x_mask, w_mask = real[:, None], wanted[None, :]
            if not WHOLE:
                x_mask = x_mask & (start + k < inputs)[None, :]
                w_mask = w_mask & (start + k < inputs)[:, None]
            x = tl.load(x_at + start, mask=x_mask, other=0.0)
            if SCALED:
                share = tl.load(share_ptr + pair, mask=real, other=0.0)
                x = (x.to(tl.float32) * share[:, None]).to(x_ptr.dtype.element_ty)
            w = tl.load(w_at + start, mask=w_mask, other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if BIAS:
            bias = tl.load(bias_ptr + expert * outputs + col, mask=wanted, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        y_at = y_ptr + pair[:, None] * outputs + col[None, :]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & wanted[None, :])


@triton.jit
def _sum_kernel(
    y_ptr, share_ptr, out_ptr, width, TOP_K: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """Outputs of a row's experts, weighted and added in the order of the experts."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        y = tl.load(y_ptr + pair * width + col, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            y = y * tl.load(share_ptr + pair)
        total += y
    tl.store(out_ptr + row * width + col, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class _Places:
    """Pairs by expert: `pairs` of each place, first and last place, and load of each expert."""

    pairs: torch.Tensor
    starts_E: torch.Tensor
    ends_E: torch.Tensor
    load_E: torch.Tensor
    row_tiles: int
    sizes: Tile

    @staticmethod
    def of(ids_TK: torch.Tensor, num_experts: int, sizes: Tile) -> _Places:
        """Three launches; the number of tiles is the most there can be."""
        ids, count = ids_TK.contiguous(), ids_TK.numel()
        zeros = torch.zeros(2, num_experts, dtype=torch.int32, device=ids.device)
        load_E, taken_E = zeros.unbind()
        starts_E, ends_E = torch.empty_like(zeros).unbind()
        row_tiles = ceil_div(count, sizes.rows) + min(num_experts, count)
        pairs = torch.empty(row_tiles * sizes.rows, dtype=torch.int32, device=ids.device)
        grid = (ceil_div(count, _BLOCK),)
        launch(_count_kernel, grid, ids, load_E, count, BLOCK=_BLOCK)
        launch(
            _offsets_kernel,
            (1,),
            load_E,
            starts_E,
            ends_E,
            EXPERTS=num_experts,
            BLOCK=power_of_two(num_experts),
            ROWS=sizes.rows,
        )
        launch(_place_kernel, grid, ids, starts_E, taken_E, pairs, count, BLOCK=_BLOCK)
        return _Places(pairs, starts_E, ends_E, load_E, row_tiles, sizes)


def experts(
    x_TD: torch.Tensor, logits_TE: torch.Tensor, routing: Routing, weights: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `experts.experts`."""
    ids_TK, shares_TK = route(logits_TE, routing)
    num_rows, top_k = ids_TK.shape
    num_experts, _, inner = weights.down.shape
    average = ceil_div(num_rows * top_k, num_experts)
    sizes = tile("experts", average, x_TD.element_size(), arch_of(x_TD))
    places = _Places.of(ids_TK, num_experts, sizes)
    x_TD, shares_TK = x_TD.contiguous(), shares_TK.float().contiguous()
    scaled = shares_TK if routing.scale_inputs else None
    gate_up = _product(x_TD, (weights.gate_up, weights.gate_up_bias), places, top_k, scaled)
    if weights.limit is None:
        h = glu(gate_up, weights.act)
    else:
        h = clamped_glu(gate_up, weights.alpha, weights.limit)
    assert h.shape[1] == inner
    pairs = _product(h, (weights.down, weights.down_bias), places, 1, None)
    out = torch.empty_like(x_TD)
    launch(
        _sum_kernel,
        (num_rows, ceil_div(out.shape[1], _SUM_BLOCK)),
        pairs,
        shares_TK,
        out,
        out.shape[1],
        TOP_K=top_k,
        SCALED=scaled is None,
        BLOCK=_SUM_BLOCK,
    )
    return out, places.load_E.long()


def _product(
    x: torch.Tensor,
    weight: tuple[LinearWeight, LinearWeight | None],
    places: _Places,
    pairs_of_row: int,
    shares: torch.Tensor | None,
) -> torch.Tensor:
    """Row p: row p // pairs_of_row of x by its expert's matrix, plus bias. (P, outputs)."""
    matrix, bias = weight
    assert isinstance(matrix, torch.Tensor), "quantised experts are not computed here"
    assert bias is None or isinstance(bias, torch.Tensor)
    assert matrix.is_contiguous()
    num_experts, outputs, inputs = matrix.shape
    sizes = places.sizes
    y = x.new_empty(len(x) * pairs_of_row, outputs)
    launch(
        _product_kernel,
        (places.row_tiles * ceil_div(outputs, sizes.cols),),
        x,
        matrix,
        matrix if bias is None else bias,
        x if shares is None else shares,
        y,
        places.pairs,
        places.starts_E,
        places.ends_E,
        places.load_E,
        places.row_tiles,
        outputs,
        inputs,
        x.stride(0),
        EXPERTS=num_experts,
        EXPERT_BLOCK=power_of_two(num_experts),
        PAIRS_OF_ROW=pairs_of_row,
        SCALED=shares is not None,
        BIAS=bias is not None,
        WHOLE=inputs % sizes.inner == 0,
        ROWS=sizes.rows,
        COLS=sizes.cols,
        INNER=sizes.inner,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return y
