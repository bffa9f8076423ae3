"""Notes a layer of experts as native ops: route, align, gather, two grouped products, sum.

Where the caller chooses the experts of each row, routing is left out.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from sylvan.kernels.api import ExpertWeights, LinearWeight, Routing, Unsupported, Value
from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.binding import FUNCTIONS, Kind
from sylvan.kernels.native.plan import Ref
from sylvan.kernels.native.sheet import Sheet

_SCORES = ("softmax", "softmax_chosen", "sigmoid", "sparsemixer")
_GROUP_ROWS = 128  # a group of rows has at most so many, or more: see LINEAR_ROWS


def record_experts(
    sheet: Sheet,
    rows: tuple[Value, Value],
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None,
) -> Value:
    """What `experts` does with rows x and their logits."""
    x, logits = rows
    _check(sheet, rows, weights, routing)
    chosen = _route(sheet, logits, weights.down.shape[0], routing)
    counts = _counts(load, weights.down.shape[0])
    visits = _Visits(*chosen, routing.top_k, counts, scale_inputs=routing.scale_inputs)
    return _visit(sheet, x, visits, weights)


def record_chosen(
    sheet: Sheet, x: Value, top_k: int, weights: ExpertWeights
) -> tuple[Value, Value, Value]:
    """The same for rows whose experts the caller knows.

    Returns: their numbers (rows, top_k) as int32 and their shares (rows, top_k) as float32, both
        without gaps between rows and without memory until they are bound; and the weighted sums.
        Numbers that are no expert's write to memory of others: the caller checks them.
    """
    _check_sizes(sheet, x, weights, top_k)
    ids = sheet.repeated(top_k, "i32", x.rows, x.times)
    shares = sheet.repeated(top_k, "f32", x.rows, x.times)
    counts = _counts(None, weights.down.shape[0])
    visits = _Visits(ids.id, shares.id, top_k, counts, scale_inputs=False)
    return ids, shares, _visit(sheet, x, visits, weights)


@dataclass(frozen=True, slots=True)
class _Visits:
    """Experts and shares of all rows, `top_k` of each; `counts` grows by each expert's rows."""

    ids: Ref
    shares: Ref
    top_k: int
    counts: Bytes
    _: KW_ONLY
    scale_inputs: bool


def _visit(sheet: Sheet, x: Value, visits: _Visits, weights: ExpertWeights) -> Value:
    """Sums of what the chosen experts make of rows of x, by their shares."""
    num_experts, top_k = weights.down.shape[0], visits.top_k
    pairs = sheet.num_rows(x.rows, top_k)
    pair, place = (sheet.draft.buffer(pairs * 4) for _ in range(2))
    most_groups = num_experts + pairs // _GROUP_ROWS + 1
    groups = sheet.draft.buffer((1 + 3 * most_groups) * 4)
    counts = sheet.draft.constant(visits.counts)
    sheet.note(Kind.ALIGN, x, (visits.ids, counts, pair, place, groups), (num_experts, top_k))
    before = visits.shares if visits.scale_inputs else None
    read = _gather(sheet, x, (pair, before), top_k, weights.gate_up)
    gate_up = _product(sheet, read, weights.gate_up, weights.gate_up_bias, groups)
    inner = sheet.new(gate_up.cols // 2, None, gate_up)
    limited = weights.limit is not None
    sizes = inner.cols, FUNCTIONS.index(weights.act), int(limited)
    scalars = weights.alpha, weights.limit or 0.0
    sheet.note(Kind.GLU, inner, (gate_up.id, inner.id), sizes, scalars)
    written = _product(sheet, inner, weights.down, weights.down_bias, groups)
    out = sheet.new(written.cols, None, x)
    after = None if visits.scale_inputs else visits.shares
    buffers = written.id, place, out.id, after
    sheet.note(Kind.EXPERT_SUM, out, buffers, (out.cols, top_k))
    return out


def _gather(
    sheet: Sheet, x: Value, pairs: tuple[Ref, Ref], top_k: int, weight: LinearWeight
) -> Value:
    """Rows of x for each of their experts, perhaps scaled, as products with `weight` read them."""
    read = sheet.repeated(x.cols, sheet.dtype, x.rows, x.times * top_k)
    pair, shares = pairs
    packed = sheet.weight(weight).packed
    if packed.kind == "dense" or shares is not None:
        sheet.note(Kind.GATHER, read, (x.id, pair, read.id, shares), (x.cols, top_k))
    else:
        sheet.gather_levels(x, read, pair, top_k, packed)
    return read


def _check(
    sheet: Sheet, rows: tuple[Value, Value], weights: ExpertWeights, routing: Routing
) -> None:
    x, logits = rows
    _check_sizes(sheet, x, weights, max(routing.top_k, routing.groups))
    if logits.dtype != "f32" or logits.cols != weights.down.shape[0]:
        raise Unsupported("experts by logits that are not float32, one for each")


def _check_sizes(sheet: Sheet, x: Value, weights: ExpertWeights, most_chosen: int) -> None:
    sheet.expect(x, "experts")
    num_experts, most = weights.down.shape[0], sheet.constants
    if num_experts > most.max_experts or most_chosen > most.max_chosen:
        raise Unsupported(
            f"{num_experts} experts of which a row visits {most_chosen}, or groups of them; "
            f"at most {most.max_experts} and {most.max_chosen}"
        )
    if (x.times, x.rows) != (1, "tokens"):
        raise Unsupported("experts of other rows than the step's")


def _route(sheet: Sheet, logits: Value, num_experts: int, routing: Routing) -> tuple[Ref, Ref]:
    """Chosen experts and their shares, without gaps between rows."""
    count = sheet.num_rows(logits.rows) * routing.top_k
    ids, shares = (sheet.draft.buffer(count * 4) for _ in range(2))
    bias = None if routing.bias is None else sheet.vector(routing.bias)
    sizes = (
        num_experts,
        routing.top_k,
        _SCORES.index(routing.scores),
        int(routing.normalise),
        routing.groups,
        routing.kept_groups,
        1 if routing.group_rank == "best" else 2,
    )
    scalars = routing.scale, routing.jitter
    sheet.note(Kind.ROUTE, logits, (logits.id, bias, ids, shares), sizes, scalars)
    return ids, shares


def _product(
    sheet: Sheet, x: Value, stack: LinearWeight, biases: LinearWeight | None, groups: Ref
) -> Value:
    shift = None if biases is None else sheet.rows_of(biases)
    return sheet.multiply(x, sheet.weight(stack), shift, groups=groups)


def _counts(load: torch.Tensor | None, num_experts: int) -> Bytes:
    """The memory of `load` itself."""
    if load is None:
        return allocate(8 * num_experts)
    assert load.dtype == torch.int64
    assert load.is_contiguous()
    return load.numpy().view(np.uint8)
