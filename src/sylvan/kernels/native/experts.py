"""Traces a MoE block: route, align, gather, two grouped linears, sum.

Without routing if the caller selects the experts of each row.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch

from sylvan.kernels.api import (
    ExpertRanks,
    ExpertWeights,
    LinearWeight,
    Routing,
    TracedTensor,
    Unsupported,
)
from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.builder import ELEMENT_BYTES, ProgramBuilder, glu_of, padded
from sylvan.kernels.native.lora import trace_lora_pairs, trace_lora_rows
from sylvan.kernels.native.opset import (
    ExpertCombine,
    ExpertSum,
    GatherRows,
    MoeAlign,
    RankMemory,
    Route,
    Scores,
)

GROUP_ROWS = 128  # rows per group; see LINEAR_ROWS


def trace_experts(
    builder: ProgramBuilder,
    rows: tuple[TracedTensor, TracedTensor],
    routing: Routing,
    weights: ExpertWeights,
    load: torch.Tensor | None,
    memory: RankMemory | None = None,
) -> TracedTensor:
    """Trace `experts` for rows x and their logits.

    `memory` is shared by the ranks among which the experts are divided.
    """
    x, logits = rows
    _check(builder, rows, weights, routing)
    experts, shares = _route(builder, logits, weights.num_experts, routing)
    counts = _counts(load, weights.num_experts)
    scale_inputs = routing.scale_inputs
    routed = _Routed(experts, shares, routing.top_k, counts, scale_inputs=scale_inputs)
    return _experts(builder, x, routed, weights, memory)


def trace_chosen(
    builder: ProgramBuilder, x: TracedTensor, top_k: int, weights: ExpertWeights
) -> tuple[TracedTensor, TracedTensor, TracedTensor]:
    """Trace experts for rows whose expert ids the caller provides.

    Returns: expert ids (rows, top_k) int32 and routing weights (rows, top_k) float32, both
    contiguous and to be bound by the caller; and the weighted sums. Out-of-range expert ids write
    out of bounds: the caller checks them.
    """
    _check_sizes(builder, x, weights, top_k)
    ids = builder.repeated(top_k, "i32", x.rows, x.times)
    shares = builder.repeated(top_k, "f32", x.rows, x.times)
    counts = _counts(None, weights.down.shape[0])
    routed = _Routed(ids.id, shares.id, top_k, counts, scale_inputs=False)
    return ids, shares, _experts(builder, x, routed, weights)


@dataclass(frozen=True, slots=True)
class _Routed:
    """Experts and routing weights of all rows, `top_k` each; `counts` adds up rows per expert."""

    experts: int
    weights: int
    top_k: int
    counts: Bytes
    _: KW_ONLY
    scale_inputs: bool


def _align(
    builder: ProgramBuilder, x: TracedTensor, routed: _Routed, weights: ExpertWeights
) -> MoeAlign:
    """Emit the op that sorts pairs by this rank's experts."""
    num_experts, top_k = weights.down.shape[0], routed.top_k
    graph, pairs = builder.graph, builder.num_rows(x.rows, top_k)
    max_groups = num_experts + pairs // GROUP_ROWS + 1
    align = MoeAlign(
        experts=routed.experts,
        load=graph.constant(routed.counts),
        sorted_pairs=graph.buffer(pairs * 4),
        pair_places=graph.buffer(pairs * 4),
        groups=graph.buffer((1 + 3 * max_groups) * 4),
        num_experts=num_experts,
        top_k=top_k,
    )
    if (expert_ranks := weights.expert_ranks) is not None:
        if expert_ranks.dispatcher is not None:
            raise Unsupported("rows of experts that a library dispatches")
        table = expert_ranks.slots_EC
        assert table.dtype == torch.int32
        assert table.is_contiguous()
        align = replace(
            align,
            slots=graph.constant(table.numpy().view(np.uint8).reshape(-1)),
            owners=graph.buffer(pairs * 4),
            copies=table.shape[1],
            first_slot=expert_ranks.first_slot,
        )
    builder.emit(align, x)
    return align


def _experts(
    builder: ProgramBuilder,
    x: TracedTensor,
    routed: _Routed,
    weights: ExpertWeights,
    memory: RankMemory | None = None,
) -> TracedTensor:
    """Emit the weighted sums of the chosen experts' outputs for rows of x."""
    top_k = routed.top_k
    align = _align(builder, x, routed, weights)
    some = align.groups if weights.expert_ranks is not None else None
    read = builder.repeated(x.cols, builder.dtype, x.rows, x.times * top_k)
    gather = GatherRows(
        x=x.id,
        sorted_pairs=align.sorted_pairs,
        groups=some,
        out=read.id,
        weights=routed.weights if routed.scale_inputs else None,
        cols=x.cols,
        top_k=top_k,
    )
    builder.emit(gather, read)
    gate_up = _linear(builder, read, weights.gate_up, weights.gate_up_bias, align.groups)
    tables = trace_lora_pairs(builder, x, align, weights.lora) if weights.lora else None
    if weights.lora and tables:
        trace_lora_rows(builder, read, gate_up, weights.lora[0], tables[0])
    inner = builder.new(gate_up.cols // 2, None, gate_up)
    builder.emit(glu_of(gate_up, inner, weights.act, weights.clamping, groups=some), inner)
    written = _linear(builder, inner, weights.down, weights.down_bias, align.groups)
    if weights.lora and tables:
        trace_lora_rows(builder, inner, written, weights.lora[1], tables[1])
    out = builder.new(written.cols, None, x)
    shares = None if routed.scale_inputs else routed.weights
    if weights.expert_ranks is not None:
        assert memory is not None
        both = _Written(align, written, out, shares)
        builder.emit(_combine(builder, both, weights.expert_ranks, memory), out)
        return out
    total = ExpertSum(
        x=written.id,
        pair_places=align.pair_places,
        out=out.id,
        weights=shares,
        cols=out.cols,
        top_k=top_k,
    )
    builder.emit(total, out)
    return out


@dataclass(frozen=True, slots=True)
class _Written:
    """Outputs of this rank's pairs, and the rows that receive their sums."""

    align: MoeAlign
    pairs: TracedTensor
    out: TracedTensor
    shares: int | None


def _combine(
    builder: ProgramBuilder, written: _Written, expert_ranks: ExpertRanks, memory: RankMemory
) -> ExpertCombine:
    align, out = written.align, written.out
    assert align.owners is not None
    row_bytes = align.top_k * padded(out.cols) * ELEMENT_BYTES[builder.dtype]
    if row_bytes > memory.buffer_bytes:
        raise Unsupported(f"{align.top_k} experts per row of {out.cols} columns on several ranks")
    return ExpertCombine(
        ranks=memory,
        x=written.pairs.id,
        pair_places=align.pair_places,
        owners=align.owners,
        out=out.id,
        weights=written.shares,
        cols=out.cols,
        top_k=align.top_k,
        width=expert_ranks.width,
        by_share=expert_ranks.all_to_all,
    )


def _check(
    builder: ProgramBuilder,
    rows: tuple[TracedTensor, TracedTensor],
    weights: ExpertWeights,
    routing: Routing,
) -> None:
    x, logits = rows
    if routing.ids is not None:
        raise Unsupported("experts that the caller selects")
    _check_sizes(builder, x, weights, max(routing.top_k, routing.groups))
    if logits.dtype != "f32" or logits.cols != weights.num_experts:
        raise Unsupported("router logits that are not float32, or not one per expert")


def _check_sizes(
    builder: ProgramBuilder, x: TracedTensor, weights: ExpertWeights, experts_per_row: int
) -> None:
    builder.expect(x, "experts")
    num_experts, most = weights.num_experts, builder.constants
    if num_experts > most.max_experts or experts_per_row > most.max_chosen:
        raise Unsupported(
            f"{num_experts} experts, {experts_per_row} per row, or these groups of experts; "
            f"the limits are {most.max_experts} and {most.max_chosen}"
        )
    if (x.times, x.rows) != (1, "tokens"):
        raise Unsupported("experts on rows other than the step's")


def _route(
    builder: ProgramBuilder, logits: TracedTensor, num_experts: int, routing: Routing
) -> tuple[int, int]:
    """Emit routing: expert ids and weights, contiguous."""
    count, table = builder.num_rows(logits.rows) * routing.top_k, routing.by_token
    experts, weights = (builder.graph.buffer(count * 4) for _ in range(2))
    op = Route(
        logits=logits.id,
        bias=None if routing.bias is None else builder.vector(routing.bias),
        by_token=None if table is None else builder.table(table),
        experts=experts,
        weights=weights,
        num_experts=num_experts,
        top_k=routing.top_k,
        vocab_rows=0 if table is None else table.shape[0],
        scores=Scores[routing.scores.upper()],
        normalise=routing.normalise,
        groups=routing.groups,
        kept_groups=routing.kept_groups,
        group_rank=1 if routing.group_rank == "best" else 2,
        scale=routing.scale,
        jitter=routing.jitter,
    )
    builder.emit(op, logits)
    return experts, weights


def _linear(
    builder: ProgramBuilder,
    x: TracedTensor,
    stack: LinearWeight,
    biases: LinearWeight | None,
    groups: int,
) -> TracedTensor:
    shift = None if biases is None else builder.table(biases)
    return builder.linear(x, stack, shift, groups=groups)


def _counts(load: torch.Tensor | None, num_experts: int) -> Bytes:
    """Return a constant over the memory of `load`."""
    if load is None:
        return allocate(8 * num_experts)
    assert load.dtype == torch.int64
    assert load.is_contiguous()
    return load.numpy().view(np.uint8)
