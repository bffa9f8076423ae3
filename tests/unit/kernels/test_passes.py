"""Passes over traced programs: packing weights, quantising rows, fusing, barriers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import ExpertWeights, LinearWeight, Routing, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight, Int4Weight, quantise_int4, quantise_int8
from sylvan.kernels.native.binding import Constants
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import Graph, ProgramLimits
from sylvan.kernels.native.opset import (
    Embed,
    GatherQuantised,
    GatherRows,
    Glu,
    GroupSums,
    Linear,
    LinearCoded,
    LinearInt4,
    LinearInt8,
    Quantise,
    RmsNorm,
    TakeColumns,
    WeightFormat,
)
from sylvan.kernels.native.quantise import fuse_quantise, quantise_rows
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.native.weights import pack_weights
from tests.support.coded import coded

D = 64
CONSTANTS = Constants(256, 32, 32, 576, 1024, 64)


def tracer() -> NativeTracer:
    limits = ProgramLimits(max_tokens=64, max_outputs=8)
    return NativeTracer(torch.float32, limits, {}, CONSTANTS)


def matrix(outputs: int = D) -> torch.Tensor:
    return torch.randn(outputs, D, generator=torch.Generator().manual_seed(outputs))


def int8(outputs: int = D) -> LinearWeight:
    return quantise_int8(matrix(outputs))


def int4(group: int = 32) -> LinearWeight:
    return quantise_int4(matrix(), group)


def normed(traced: NativeTracer) -> TracedTensor:
    h, _ = ops.rms_norm(traced.input(D, "f32"), torch.ones(D), 1e-6)
    return h


def kinds(graph: Graph) -> list[type]:
    return [type(op) for op in graph.ops]


def quantised(traced: NativeTracer) -> Graph:
    return quantise_rows(pack_weights(traced.graph))


def test_packing_decides_which_linear_it_is():
    traced = tracer()
    x = traced.input(D, "f32")
    for weight in (matrix(), int8(), int4()):
        ops.linear(x, weight)

    assert kinds(traced.graph) == [Linear] * 3
    assert kinds(pack_weights(traced.graph)) == [Linear, LinearInt8, LinearInt4]


def test_the_format_of_a_deferred_weight_is_known_when_it_is_read():
    traced, read = tracer(), []

    def load() -> LinearWeight:
        read.append(True)
        return int8()

    deferred = DeferredWeight(torch.Size((D, D)), load, "w")
    ops.linear(traced.input(D, "f32"), deferred)
    ops.embedding(traced.input_ids, deferred)

    assert not read
    linear, embed = pack_weights(traced.graph).ops
    assert len(read) == 1  # packed once for both
    assert isinstance(linear, LinearInt8)
    assert isinstance(embed, Embed)
    assert embed.format == WeightFormat.INT8
    assert (embed.weight, embed.col_scale) == (linear.weight, linear.col_scale)


def test_tracing_leaves_weights_and_packing_frees_them():
    traced, weight = tracer(), matrix()
    ops.linear(traced.input(D, "f32"), weight)

    assert weight.untyped_storage().nbytes() == D * D * 4
    packed = pack_weights(traced.graph)

    assert weight.untyped_storage().nbytes() == 0
    assert [copy.source is weight for copy in packed.copies] == [True]
    assert traced.graph.constants == [None]  # a pass changes no graph but its own
    assert all(part is not None for part in packed.constants)


def test_a_group_without_a_kernel_is_refused_when_traced():
    odd = Int4Weight(torch.zeros(D, D // 2, dtype=torch.uint8), torch.zeros(D, 2), 48)

    with pytest.raises(Unsupported, match="groups of 48"):
        ops.linear(tracer().input(D, "f32"), odd)


def test_codes_ask_for_sums_and_orders_of_their_own_only():
    traced = tracer()
    x = traced.input(D, "f32")
    for kind in ("int4 g32", "uint4 g32 shifts"):
        ops.linear(x, coded(kind, D, D))
    ops.linear(x, replace(coded("int4 g32", D, D), order=torch.arange(D).flip(0).int()))
    odd = coded("int4", D, D, group=24)

    assert kinds(quantised(traced)) == [
        LinearCoded,
        GroupSums,
        LinearCoded,
        TakeColumns,
        LinearCoded,
    ]
    with pytest.raises(Unsupported, match="groups of 24"):
        ops.linear(x, odd)


def test_linears_that_read_alike_share_quantised_rows():
    traced = tracer()
    x = traced.input(D, "f32")
    for weight in (int8(), int4(32), int8(32), int4(64), int4(32)):
        ops.linear(x, weight)

    graph = quantised(traced)

    assert Counter(kinds(graph)) == {Quantise: 3, LinearInt8: 2, LinearInt4: 3}
    rows = {op.quantised.qvalues: op for op in graph.ops if isinstance(op, Quantise)}
    for op in graph.ops:
        if isinstance(op, LinearInt8 | LinearInt4):
            made = rows[op.x]
            assert made.x == x.id
            assert (made.quantised.group, made.quantised.bytes) == (op.group, op.x_bytes)
            assert made.quantised.scales == op.row_scale
            assert made.quantised.biased == isinstance(op, LinearInt8)


def test_rows_that_change_are_quantised_again():
    traced = tracer()
    residual, x = traced.input(D, "f32"), traced.input(D, "f32")
    ops.linear(residual, int8())
    ops.rms_norm(x, torch.ones(D), 1e-6, residual)  # adds x to the residual
    ops.linear(residual, int8())

    assert kinds(quantised(traced)).count(Quantise) == 2


def test_segments_share_no_quantised_rows():
    traced = tracer()
    x = traced.input(D, "f32")
    ops.linear(x, int8())
    second = traced.next_segment()
    ops.linear(x, int8(32))

    found = [op.segment for op in quantised(traced).ops if isinstance(op, Quantise)]

    assert found == [0, second]


def test_the_op_that_makes_rows_quantises_them_once():
    traced = tracer()
    h = normed(traced)
    ops.linear(h, int8())
    ops.linear(h, int4())

    before = quantised(traced)
    after = fuse_quantise(before)

    assert kinds(before) == [RmsNorm, Quantise, LinearInt8, Quantise, LinearInt4]
    assert kinds(after) == [RmsNorm, LinearInt8, Quantise, LinearInt4]
    norm, linear = after.ops[:2]
    assert isinstance(norm, RmsNorm)
    assert isinstance(linear, LinearInt8)
    assert norm.quantised.qvalues == linear.x
    assert norm.quantised.scales == linear.row_scale


def test_nothing_is_fused_over_segments():
    traced = tracer()
    h = normed(traced)
    traced.next_segment()
    ops.linear(h, int8())

    assert kinds(fuse_quantise(quantised(traced))) == [RmsNorm, Quantise, LinearInt8]


def test_rows_without_a_producer_keep_their_op():
    traced = tracer()
    ops.linear(traced.input(D, "f32"), int8())

    assert kinds(fuse_quantise(quantised(traced))) == [Quantise, LinearInt8]


def experts(traced: NativeTracer, convert, *, scale_inputs: bool = False) -> list[type]:
    stack = torch.randn(4, 2 * D, D, generator=torch.Generator().manual_seed(0))
    weights = ExpertWeights(gate_up=convert(stack), down=convert(stack[:, :D]))
    routing = Routing(top_k=2, scale_inputs=scale_inputs)
    ops.experts(normed(traced), traced.input(4, "f32"), routing, weights)
    return kinds(fuse_quantise(quantised(traced)))


def test_rows_are_quantised_before_they_are_gathered():
    found = Counter(experts(tracer(), quantise_int8))

    assert found[GatherQuantised] == 1
    assert found[GatherRows] == found[Quantise] == 0  # the norm and the gated product do it


def test_weighted_and_plain_rows_are_gathered_as_they_are():
    weighted = Counter(experts(tracer(), quantise_int8, scale_inputs=True))
    plain = Counter(experts(tracer(), torch.clone))

    assert weighted[GatherRows] == plain[GatherRows] == 1
    assert weighted[Quantise] == plain[Quantise] == weighted[GatherQuantised] == 0
    assert plain[Linear] == 2
    assert plain[Glu] == 1


def waiting(traced: NativeTracer) -> list[bool]:
    return [bool(wait) for wait in compile_graph(traced.graph).records["waits"]]


def test_projections_of_the_same_rows_share_a_barrier():
    traced = tracer()
    h = normed(traced)
    gate, up = ops.linear(h, matrix()), ops.linear(h, matrix(2 * D))
    ops.linear(ops.glu(up, "silu"), matrix(D // 2)[:, :D])
    traced.pin(gate)

    # the glu reads what the second linear writes, the last linear what the glu does
    assert waiting(traced) == [False, True, False, True, True]


def test_an_op_waits_before_it_overwrites_what_others_read():
    traced = tracer()
    x = ops.activation(normed(traced), "silu")
    ops.activation(x, "silu")  # into the memory of the normed rows, which are not needed any more
    y = ops.activation(normed(traced), "relu")
    layout = compile_graph(traced.graph)

    assert layout.home[traced.graph.ops[0].out] == layout.home[traced.graph.ops[2].out]
    assert waiting(traced)[:4] == [False, True, True, True]
    assert y.cols == D


def test_ops_that_touch_more_than_their_operands_wait_and_are_waited_for():
    traced = tracer()
    x = traced.input(D, "f32")
    ops.linear(x, matrix())
    ops.take_rows(x, traced.sample_rows)
    ops.linear(x, matrix(2 * D))

    assert waiting(traced) == [False, True, True]


def test_a_part_of_a_program_waits_for_its_own_ops_only():
    traced = tracer()
    x = traced.input(D, "f32")
    first, second = ops.linear(x, matrix()), ops.linear(x, matrix(2 * D))
    ops.activation(first, "silu")
    ops.activation(second, "silu")
    layout = compile_graph(traced.graph)

    assert layout.records["waits"].tolist() == [0, 0, 1, 0]
    assert layout.records_of([0, 1, 3])["waits"].tolist() == [0, 0, 1], "nothing else is between"
