"""Packs the weights of a traced program; their formats decide the types of its linear ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight, Unsupported
from sylvan.kernels.matmul.codes import packed_bits_of
from sylvan.kernels.matmul.pack import as_bytes, pack, pack_stack
from sylvan.kernels.matmul.packed import PackedWeight
from sylvan.kernels.matmul.weights import DeferredWeight, PackKind
from sylvan.kernels.native.builder import ELEMENT_BYTES
from sylvan.kernels.native.copies import MatrixCopy, VectorCopy
from sylvan.kernels.native.graph import Graph
from sylvan.kernels.native.opset import (
    Code,
    Embed,
    GroupSums,
    Linear,
    LinearCoded,
    LinearInt4,
    LinearInt8,
    ScaleType,
    TakeColumns,
    WeightFormat,
)
from sylvan.kernels.native.packing import can_pack, pack_plain
from sylvan.kernels.native.schema import Op
from sylvan.kernels.native.weight_file import PackedWeightFile

_LINEARS: Mapping[PackKind, type[Linear]] = MappingProxyType(
    {"dense": Linear, "int8": LinearInt8, "int4": LinearInt4}
)
_FORMATS: Mapping[PackKind, WeightFormat] = MappingProxyType(
    {
        "dense": WeightFormat.DENSE,
        "int8": WeightFormat.INT8,
        "int4": WeightFormat.INT4,
        "coded": WeightFormat.CODED,
    }
)
_SCALES: Mapping[torch.dtype, ScaleType] = MappingProxyType(
    {
        torch.float32: ScaleType.F32,
        torch.float16: ScaleType.F16,
        torch.bfloat16: ScaleType.BF16,
        torch.int8: ScaleType.I8,
    }
)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed weight, and the constants of its scales and other parts, by name."""

    weight: PackedWeight
    parts: Mapping[str, int]


def pack_weights(graph: Graph, kept: PackedWeightFile | None = None) -> Graph:
    """Pack the weights in the order in which they were traced, except those found in `kept`.

    Only one weight is in memory twice at a time: the memory of a torch parameter is freed once it
    has been packed, after which the model cannot compute with tensors.

    Raises:
        Unsupported: a format without a kernel, found only when the weight is read.
    """
    made = graph.with_ops(())
    packed: dict[int, _Packed] = {}
    for ref in sorted((*graph.weights, *graph.tables), reverse=True):  # ~0, ~1, ...
        if ref in graph.weights:
            packed[ref] = _pack(made, ref, graph.weights[ref], kept)
        else:
            _keep_rows(made, ref, graph.tables[ref])
    made.weights, made.tables = {}, {}
    made.ops = [op for old in graph.ops for op in _lowered(made, old, packed)]
    return made


def _pack(graph: Graph, ref: int, weight: LinearWeight, kept: PackedWeightFile | None) -> _Packed:
    stacked = len(weight.shape) == 3
    found = None if kept is None else kept.take(weight)
    if found is None:
        plain = weight.plain if isinstance(weight, DeferredWeight) else None
        if plain is not None and can_pack(plain.form.kind):
            found = pack_plain(plain, weight.shape, graph.dtype)
        else:
            found = (pack_stack if stacked else pack)(weight, graph.dtype)
        if kept is not None:
            kept.keep(weight, found)
    graph.constants[~ref] = found.data
    names = [name for name in found.parts if name != "data"]
    parts = {name: graph.constant(found.parts[name]) for name in names}
    source, derive = weight, None
    if isinstance(weight, DeferredWeight) and weight.origin is not None:
        source, derive = weight.origin
    count = weight.shape[0] if stacked else 0
    graph.copies.append(MatrixCopy(source, found, count, graph.dtype, derive))
    if isinstance(weight, torch.Tensor):
        weight.untyped_storage().resize_(0)
    return _Packed(found, parts)


def _keep_rows(graph: Graph, ref: int, matrix: LinearWeight) -> None:
    """A float32 copy of the rows of a matrix, each padded to 32 columns."""
    found = matrix.load() if isinstance(matrix, DeferredWeight) else matrix
    assert isinstance(found, torch.Tensor)
    rows = found.detach().float().flatten(1)  # taps of a convolution have a dimension of 1 before
    values = F.pad(rows, (0, -rows.shape[1] % 32))
    data = graph.constants[~ref] = as_bytes(values)
    graph.copies.append(VectorCopy(matrix, data, found.shape, values.shape[1]))


def _lowered(graph: Graph, op: Op, packed: Mapping[int, _Packed]) -> Iterator[Op]:
    if not isinstance(op, Linear | Embed) or op.weight not in packed:
        yield op
        return
    found = packed[op.weight]
    weight, scale = found.weight, found.parts.get("scale")
    if isinstance(op, Embed):
        form = _FORMATS[weight.kind]
        table = replace(op, col_scale=scale, format=form, words=weight.words, group=weight.group)
        if weight.form.ordered:
            raise Unsupported("a quantised embedding with permuted columns")
        yield replace(table, **_code_operands(found)) if weight.kind == "coded" else table
        return
    if op.parts > 1 and weight.kind != "dense":
        raise Unsupported("partial sums of quantised matrices")
    linear = replace(op, words=weight.words, group=weight.group, col_scale=scale)
    if weight.kind == "dense":
        yield linear
    elif weight.kind == "coded":
        yield from _coded(graph, linear, found)
    else:
        operands: dict[str, Any] = _operands(linear) | {"sums": found.parts.get("sums")}
        yield _LINEARS[weight.kind](**operands)


def _coded(graph: Graph, linear: Linear, found: _Packed) -> Iterator[Op]:
    form = found.weight.form
    assert form.code
    operands = _operands(linear)
    if "order" in found.parts:
        if linear.x_head_step:
            raise Unsupported("quantised matrices of heads with permuted inputs")
        size = graph.limits.max_rows(linear.rows, linear.times) * linear.x_bytes
        operands["x"] = graph.buffer(size)
        yield TakeColumns(
            x=linear.x,
            order=found.parts["order"],
            out=operands["x"],
            cols=linear.cols,
            x_stride=linear.x_bytes // ELEMENT_BYTES[linear.dtype],
            **_header(linear),
        )
    if "shifts" in found.parts:
        groups = linear.words * 32 // packed_bits_of(form.code) // linear.group
        most = graph.limits.max_rows(linear.rows, linear.times)
        sums = operands["x_sums"] = graph.buffer(most * groups * 4)
        yield GroupSums(
            x=operands["x"], out=sums, cols=linear.cols, group=linear.group, **_header(linear)
        )
    yield LinearCoded(
        **operands,
        **_code_operands(found),
    )


def _code_operands(found: _Packed) -> dict[str, Any]:
    form = found.weight.form
    return {
        "zeros": found.parts.get("zeros"),
        "shifts": found.parts.get("shifts"),
        "steps": found.parts.get("steps"),
        "code": Code[form.code.upper()],
        "scale_type": _SCALES[form.scale],
        "per_row": not form.group,
    }


def _header(op: Op) -> dict[str, Any]:
    return {"dtype": op.dtype, "rows": op.rows, "times": op.times, "segment": op.segment}


def _operands(linear: Linear) -> dict[str, Any]:
    return {part.name: getattr(linear, part.name) for part in fields(linear)}
