"""Traces the adapters of a linear layer: two ops after it, which skip steps without adapters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sylvan.kernels.adapters import MAX_PARTS, LoraLayer
from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.builder import ELEMENT_BYTES, ProgramBuilder, padded
from sylvan.kernels.native.opset import (
    LoraExpand,
    LoraLookup,
    LoraPairs,
    LoraShrink,
    LoraTables,
    MoeAlign,
)

MAX_ROW_BYTES = 1 << 16
"""Maximum row size: 16 rows of x fit into the scratch memory of a thread."""
_TILE_ROWS = 16


def trace_lora(
    builder: ProgramBuilder, x: TracedTensor, y: TracedTensor, layer: LoraLayer
) -> TracedTensor:
    """Add the adapter outputs of `layer` for x to y, in place. Shapes: (T, K), (T, N).

    Raises:
        Unsupported: the rows are not those of a step, or have too many columns.
    """
    if (x.rows, x.times) != ("outputs" if layer.of_outputs else "tokens", 1):
        raise Unsupported("adapters of rows that are not a step's")
    return trace_lora_rows(builder, x, y, layer, _tables(builder, layer))


def trace_lora_pairs(
    builder: ProgramBuilder, x: TracedTensor, align: MoeAlign, layers: tuple[LoraLayer, LoraLayer]
) -> tuple[LoraTables, LoraTables]:
    """Emit the op that finds pairs of a row and an expert with adapters, for `trace_lora_rows`.

    Raises:
        Unsupported: the rows are not those of a step.
    """
    if (x.rows, x.times) != ("tokens", 1):
        raise Unsupported("adapters of rows that are not a step's")
    rows = layers[0].rows
    slots, most = rows.num_slots * align.num_experts, rows.max_tokens * align.top_k
    pairs = LoraPairs(
        step_rows=builder.graph.constant(rows.memory),
        groups=align.groups,
        sorted_pairs=align.sorted_pairs,
        slot_rows=builder.graph.buffer((1 + 3 * slots + most) * 4),
        slots=rows.num_slots,
        max_tokens=rows.max_tokens,
        num_experts=align.num_experts,
        top_k=align.top_k,
    )
    builder.emit(pairs, x)
    tables = (
        replace(_tables(builder, layer), slot_rows=pairs.slot_rows, slots=slots, max_tokens=most)
        for layer in layers
    )
    return next(tables), next(tables)


def trace_lora_rows(
    builder: ProgramBuilder,
    x: TracedTensor,
    y: TracedTensor,
    layer: LoraLayer,
    tables: LoraTables,
) -> TracedTensor:
    """`trace_lora` for the rows in `tables`."""
    builder.expect(x, "adapters")
    x_bytes = padded(x.cols) * ELEMENT_BYTES[builder.dtype]
    if x_bytes > MAX_ROW_BYTES or len(layer.outputs) > MAX_PARTS:
        raise Unsupported(f"adapters of {x.cols} inputs and {len(layer.outputs)} parts")
    inner = _inner(builder, y, tables)
    shrink = LoraShrink(x=x.id, inner=inner, tables=tables, x_bytes=x_bytes)
    builder.emit(shrink, x, dtype=builder.dtype)
    return _expand(builder, y, inner, tables, layer)


def trace_lora_embedding(
    builder: ProgramBuilder, y: TracedTensor, layer: LoraLayer
) -> TracedTensor:
    """Add the adapter outputs of `layer` for a step's ids to y, in place. Shape: (T, N)."""
    tables = _tables(builder, layer)
    inner = _inner(builder, y, tables)
    lookup = LoraLookup(inner=inner, tables=tables, num_ids=layer.inputs)
    builder.emit(lookup, y, dtype=builder.dtype)
    return _expand(builder, y, inner, tables, layer)


def _tables(builder: ProgramBuilder, layer: LoraLayer) -> LoraTables:
    """Operands of both products."""
    graph, rows = builder.graph, layer.rows
    return LoraTables(
        slot_rows=graph.constant(rows.memory),
        factors=graph.constant(layer.memory),
        slots=rows.num_slots,
        max_tokens=rows.max_tokens,
        parts=len(layer.outputs),
        width=padded(rows.max_rank),
    )


def _inner(builder: ProgramBuilder, y: TracedTensor, tables: LoraTables) -> int:
    """Allocate the rows between the two products."""
    # tiles may read a whole tile beyond the last row of a slot
    most = builder.num_rows(y.rows, y.times) + _TILE_ROWS
    return builder.graph.buffer(most * tables.parts * tables.width * ELEMENT_BYTES[builder.dtype])


def _expand(
    builder: ProgramBuilder, y: TracedTensor, inner: int, tables: LoraTables, layer: LoraLayer
) -> TracedTensor:
    part_cols = allocate(4 * tables.parts)
    part_cols.view(np.int32)[:] = layer.outputs
    expand = LoraExpand(
        y=y.id,
        inner=inner,
        part_cols=builder.graph.constant(part_cols),
        tables=tables,
        y_stride=padded(y.cols),
        f32=y.dtype == "f32" != builder.dtype,
    )
    builder.emit(expand, y, dtype=builder.dtype)
    layer.packed = True
    return y
