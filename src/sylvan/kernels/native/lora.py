"""Traces what adapters add to a linear layer: two ops behind it, which do nothing without rows."""

from __future__ import annotations

import numpy as np

from sylvan.kernels.adapters import MAX_PARTS, LoraLayer
from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.builder import ELEMENT_BYTES, ProgramBuilder, padded
from sylvan.kernels.native.opset import LoraExpand, LoraLookup, LoraShrink, LoraTables

MAX_ROW_BYTES = 1 << 16
"""Sixteen rows of x fit into the scratch memory of a thread."""
_TILE_ROWS = 16


def trace_lora(
    builder: ProgramBuilder, x: TracedTensor, y: TracedTensor, layer: LoraLayer
) -> TracedTensor:
    """Add to y what the adapters of `layer` make of x, in place. Shapes: (T, K), (T, N).

    Raises:
        Unsupported: rows that are not those of a step, or of too many columns.
    """
    builder.expect(x, "adapters")
    x_bytes = padded(x.cols) * ELEMENT_BYTES[builder.dtype]
    if (x.rows, x.times) != ("outputs" if layer.of_outputs else "tokens", 1):
        raise Unsupported("adapters of rows that are not a step's")
    if x_bytes > MAX_ROW_BYTES or len(layer.outputs) > MAX_PARTS:
        raise Unsupported(f"adapters of {x.cols} inputs and {len(layer.outputs)} parts")
    inner, tables = _inner(builder, y, layer)
    shrink = LoraShrink(x=x.id, inner=inner, tables=tables, x_bytes=x_bytes)
    builder.emit(shrink, x, dtype=builder.dtype)
    return _expand(builder, y, inner, tables, layer)


def trace_lora_embedding(
    builder: ProgramBuilder, y: TracedTensor, layer: LoraLayer
) -> TracedTensor:
    """Add to y what the adapters of `layer` make of the ids of a step, in place. Shape: (T, N)."""
    inner, tables = _inner(builder, y, layer)
    lookup = LoraLookup(inner=inner, tables=tables, num_ids=layer.inputs)
    builder.emit(lookup, y, dtype=builder.dtype)
    return _expand(builder, y, inner, tables, layer)


def _inner(builder: ProgramBuilder, y: TracedTensor, layer: LoraLayer) -> tuple[int, LoraTables]:
    """Rows between the two products, and what both of them look up."""
    graph, rows, parts = builder.graph, layer.rows, len(layer.outputs)
    tables = LoraTables(
        slot_rows=graph.constant(rows.memory),
        factors=graph.constant(layer.memory),
        slots=rows.num_slots,
        max_tokens=rows.max_tokens,
        parts=parts,
        width=padded(rows.max_rank),
    )
    # tiles read whole ones behind the last row of a slot, wherever that is
    most = builder.num_rows(y.rows) + _TILE_ROWS
    return graph.buffer(most * parts * tables.width * ELEMENT_BYTES[builder.dtype]), tables


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
