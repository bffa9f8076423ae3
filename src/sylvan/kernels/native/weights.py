"""Packs the weights of a traced program; their formats decide which linears the ops are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import torch
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.matmul.pack import PackedWeight, PackKind, as_bytes, pack, pack_stack
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.copies import MatrixCopy, VectorCopy
from sylvan.kernels.native.graph import Graph
from sylvan.kernels.native.opset import Embed, Linear, LinearInt4, LinearInt8, WeightFormat
from sylvan.kernels.native.schema import Op

_LINEARS: Mapping[PackKind, type[Linear]] = MappingProxyType(
    {"dense": Linear, "int8": LinearInt8, "int4": LinearInt4}
)
_FORMATS: Mapping[PackKind, WeightFormat] = MappingProxyType(
    {"dense": WeightFormat.DENSE, "int8": WeightFormat.INT8, "int4": WeightFormat.INT4}
)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed weight, and the constants of its scales and sums."""

    weight: PackedWeight
    scale: int | None
    sums: int | None


def pack_weights(graph: Graph) -> Graph:
    """Pack each weight, in the order in which they were traced.

    One is in memory twice at a time: the memory of a torch parameter is freed when it has been
    packed, and the model cannot compute with tensors afterwards.

    Raises:
        Unsupported: a format without a kernel, which only reading the weight shows.
    """
    made = graph.with_ops(())
    packed: dict[int, _Packed] = {}
    for ref in sorted((*graph.weights, *graph.tables), reverse=True):  # ~0, ~1, ...
        if ref in graph.weights:
            packed[ref] = _pack(made, ref, graph.weights[ref])
        else:
            _keep_rows(made, ref, graph.tables[ref])
    made.weights, made.tables = {}, {}
    made.ops = [_lowered(op, packed) for op in graph.ops]
    return made


def _pack(graph: Graph, ref: int, weight: LinearWeight) -> _Packed:
    stacked = len(weight.shape) == 3
    found = (pack_stack if stacked else pack)(weight, graph.dtype)
    graph.constants[~ref] = found.data
    scale, sums = (
        None if part is None else graph.constant(part) for part in (found.scale, found.sums)
    )
    source, derive = weight, None
    if isinstance(weight, DeferredWeight) and weight.origin is not None:
        source, derive = weight.origin
    count = weight.shape[0] if stacked else 0
    graph.copies.append(MatrixCopy(source, found, count, graph.dtype, derive))
    if isinstance(weight, torch.Tensor):
        weight.untyped_storage().resize_(0)
    return _Packed(found, scale, sums)


def _keep_rows(graph: Graph, ref: int, matrix: LinearWeight) -> None:
    """A float32 copy of the rows of a matrix, each padded to 32 columns."""
    found = matrix.load() if isinstance(matrix, DeferredWeight) else matrix
    assert isinstance(found, torch.Tensor)
    values = F.pad(found.detach().float(), (0, -found.shape[1] % 32))
    data = graph.constants[~ref] = as_bytes(values)
    graph.copies.append(VectorCopy(matrix, data, found.shape, values.shape[1]))


def _lowered(op: Op, packed: Mapping[int, _Packed]) -> Op:
    if not isinstance(op, Linear | Embed) or op.weight not in packed:
        return op
    found = packed[op.weight]
    weight = found.weight
    if isinstance(op, Embed):
        form = _FORMATS[weight.kind]
        return replace(
            op, col_scale=found.scale, format=form, words=weight.words, group=weight.group
        )
    linear = replace(op, words=weight.words, group=weight.group, col_scale=found.scale)
    if weight.kind == "dense":
        return linear
    operands = {part.name: getattr(linear, part.name) for part in fields(linear)}
    operands["sums"] = found.sums
    return _LINEARS[weight.kind](**operands)
