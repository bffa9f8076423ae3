"""Quantises the inputs of int8 and int4 linears: by separate ops, then fused into others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sylvan.kernels.native.graph import Graph
from sylvan.kernels.native.opset import (
    Activation,
    GatherQuantised,
    GatherRows,
    Glu,
    LayerNorm,
    Linear,
    LinearInt4,
    LinearInt8,
    Quantise,
    QuantisedRows,
    RmsNorm,
    Xielu,
)
from sylvan.kernels.native.schema import Op, buffers_of

_MAKERS = (RmsNorm, LayerNorm, Glu, Activation, Xielu, GatherRows)


def quantise_rows(graph: Graph) -> Graph:
    """Make int8 and int4 linears read quantised rows.

    Rows are quantised once for all linears of a segment that read the same form, by a `Quantise`
    before the first. Rows that are only gathered for experts are quantised before the gather.
    """
    return _Quantising(graph).run()


def fuse_quantise(graph: Graph) -> Graph:
    """Fuse each `Quantise` into the op of the same segment that produces the rows.

    An op can do so once; further `Quantise` ops of its rows stay.
    """
    ops: list[Op] = []
    writers: dict[int, int] = {}  # buffer -> the op that made it
    for op in graph.ops:
        maker = writers.get(op.x) if isinstance(op, Quantise) else None
        if isinstance(op, Quantise) and maker is not None and _can_quantise(ops[maker], op):
            made = ops[maker]
            assert isinstance(made, _MAKERS)
            ops[maker] = replace(made, quantised=op.quantised)
            continue
        for part in buffers_of(op):
            if part.access != "read":
                writers[part.ref] = len(ops)
        ops.append(op)
    return graph.with_ops(ops)


def _can_quantise(maker: Op, op: Quantise) -> bool:
    if not isinstance(maker, _MAKERS) or maker.quantised.qvalues is not None:
        return False
    return maker.out == op.x and maker.segment == op.segment


class _Quantising:
    """One pass over a graph; tracks rows that are quantised already, by form."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._ops = graph.with_ops(()), graph.ops
        self._known: dict[tuple[object, ...], QuantisedRows] = {}

    def run(self) -> Graph:
        self._graph.ops = list(self._rewritten())
        return self._graph

    def _rewritten(self) -> Iterator[Op]:
        for index, op in enumerate(self._ops):
            if isinstance(op, LinearInt8 | LinearInt4):
                rows = self._known.get(_key(op.x, op))
                if rows is None:
                    rows = self._rows(op, op)
                    yield self._quantise(op.x, op, rows, op)
                yield _reading(op, rows)
            elif isinstance(op, GatherRows) and (linear := self._only_reader(index, op)):
                source = self._known.get(_key(op.x, linear))
                if source is None:
                    plain = replace(op, times=op.times // op.top_k)
                    source = self._rows(plain, linear)
                    yield self._quantise(op.x, linear, source, plain)
                made = self._known[_key(op.out, linear)] = self._rows(op, linear)
                yield _gathered(op, source, made)
            else:
                yield op
            written = {part.ref for part in buffers_of(op) if part.access != "read"}
            if not isinstance(op, GatherRows):
                self._known = {k: rows for k, rows in self._known.items() if k[0] not in written}

    def _quantise(self, x: int, linear: Linear, rows: QuantisedRows, like: Op) -> Quantise:
        self._known[_key(x, linear)] = rows
        return Quantise(
            x=x,
            quantised=rows,
            cols=linear.cols,
            dtype=like.dtype,
            rows=like.rows,
            times=like.times,
            segment=like.segment,
        )

    def _rows(self, like: Op, linear: Linear) -> QuantisedRows:
        """Allocate rows of `like`, quantised as `linear` reads them."""
        graph, num_bytes = self._graph, row_bytes(linear)
        most = graph.limits.max_rows(like.rows, like.times)
        groups = num_bytes // linear.group if linear.group else 0
        return QuantisedRows(
            qvalues=graph.buffer(most * num_bytes),
            scales=graph.buffer(most * 4),
            sums=graph.buffer(most * groups * 4) if groups else None,
            group=linear.group,
            biased=isinstance(linear, LinearInt8),
            bytes=num_bytes,
        )

    def _only_reader(self, index: int, gather: GatherRows) -> Linear | None:
        """Return the only linear that reads gathered rows, if quantised and unweighted."""
        readers = [
            op
            for op in self._ops[index + 1 :]
            if any(part.ref == gather.out for part in buffers_of(op))
        ]
        if gather.weights is not None or len(readers) != 1:
            return None
        (reader,) = readers
        return reader if isinstance(reader, LinearInt8 | LinearInt4) else None


def row_bytes(linear: Linear) -> int:
    """Bytes of a quantised row that `linear` reads."""
    return linear.words * (4 if isinstance(linear, LinearInt8) else 8)


def _key(x: int, linear: Linear) -> tuple[object, ...]:
    return x, linear.segment, type(linear), linear.group


def _reading(linear: Linear, rows: QuantisedRows) -> Linear:
    assert rows.qvalues is not None
    sums = linear.sums if isinstance(linear, LinearInt8) else rows.sums
    return replace(linear, x=rows.qvalues, row_scale=rows.scales, sums=sums, x_bytes=rows.bytes)


def _gathered(op: GatherRows, source: QuantisedRows, made: QuantisedRows) -> GatherQuantised:
    assert source.qvalues is not None
    assert source.scales is not None
    assert made.qvalues is not None
    assert made.scales is not None
    return GatherQuantised(
        qvalues=source.qvalues,
        scales=source.scales,
        sums=source.sums,
        sorted_pairs=op.sorted_pairs,
        groups=op.groups,
        out_qvalues=made.qvalues,
        out_scales=made.scales,
        out_sums=made.sums,
        bytes=source.bytes,
        top_k=op.top_k,
        num_groups=source.bytes // source.group if source.group else 0,
        dtype=op.dtype,
        rows=op.rows,
        times=op.times,
        segment=op.segment,
    )
