"""Traces recurrent layers; their states are constants of a program, like KV pages.

Shapes: T rows, C channels, K taps, H heads, N numbers of state, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sylvan.kernels.api import LinearWeight, TracedTensor, Unsupported
from sylvan.kernels.matmul.pack import as_bytes
from sylvan.kernels.native.builder import ProgramBuilder, padded
from sylvan.kernels.native.heads import HeadProducts
from sylvan.kernels.native.opset import (
    Add,
    DeltaScan,
    Function,
    GateNorm,
    GateRows,
    JoinColumns,
    MlstmScan,
    RgLruScan,
    ShortConv,
    SpaceScan,
    TakeColumns,
    TokenMix,
    Wkv6Scan,
    Wkv7Inputs,
    Wkv7Out,
    Wkv7Scan,
    WkvScan,
)
from sylvan.kernels.recurrent import (
    Columns,
    ConvLayer,
    DeltaLayer,
    GateRule,
    MlstmLayer,
    RgLruLayer,
    SpaceLayer,
    Wkv6Layer,
    Wkv6Rows,
    Wkv7Layer,
    Wkv7Rows,
    WkvLayer,
)

MAX_TAPS, MAX_STATES = 64, 1024  # states per channel: a block of them fits into scratch memory
_MAX_MATRIX = 1 << 18  # numbers of a head's matrix, with its temporaries in scratch memory
_MAX_WIDTH = 256  # columns of a head of RWKV-5 to RWKV-7
_MAX_GATED = 1 << 17  # columns of a part, which must fit into scratch memory


class StateTracer:
    """Implements `RecurrentTracer`. `states` are all slots of each state, by its number."""

    def __init__(self, builder: ProgramBuilder, states: Sequence[torch.Tensor]) -> None:
        self._builder, self._states = builder, states

    def conv(self, x: Columns, layer: ConvLayer) -> TracedTensor:
        channels, taps = layer.weight.shape[0], layer.weight.shape[-1]
        if taps > MAX_TAPS:
            raise Unsupported(f"convolutions with {taps} taps")
        builder = self._builder
        builder.expect(x.rows, "a convolution")
        out = builder.new(channels, None, x.rows)
        op = ShortConv(
            x=x.rows.id,
            weight=builder.table(layer.weight),
            bias=None if layer.bias is None else builder.vector(layer.bias),
            state=self.state(layer.part, (taps, channels), exact=False),
            out=out.id,
            channels=channels,
            taps=taps,
            weight_stride=padded(taps),
            x_first=x.first,
            x_stride=padded(x.rows.cols),
            out_stride=padded(channels),
            silu=layer.silu,
            gated=layer.gated,
        )
        builder.emit(op, out)
        return out

    def space(
        self, x: Columns, dt: Columns | None, bc: tuple[Columns, Columns], layer: SpaceLayer
    ) -> TracedTensor:
        heads, builder, (b, c) = layer.decay.shape[0], self._builder, bc
        if layer.states > MAX_STATES:
            raise Unsupported(f"{layer.states} state numbers per channel")
        for rows in (x, b, c, *([dt] if dt else [])):
            builder.expect(rows.rows, "a state space")
        by_state = len(layer.decay.shape) == 2
        if by_state:
            decay = builder.table(layer.decay)
        else:
            assert isinstance(layer.decay, torch.Tensor)
            decay = builder.vector(layer.decay)
        out = builder.new(heads * layer.width, "f32", x.rows)
        op = SpaceScan(
            x=x.rows.id,
            dt=dt.rows.id if dt else None,
            dt_bias=None if layer.dt_bias is None else builder.vector(layer.dt_bias),
            a=decay,
            b=b.rows.id,
            c=c.rows.id,
            d=builder.vector(layer.skip),
            state=self.state(layer.part, (heads, layer.width, layer.states), exact=True),
            out=out.id,
            width=layer.width,
            num_heads=heads,
            states=layer.states,
            groups=layer.groups,
            a_by_state=by_state,
            a_stride=padded(layer.states),
            raw=dt is not None,
            x_first=x.first,
            x_stride=padded(x.rows.cols),
            b_first=b.first,
            b_stride=padded(b.rows.cols),
            c_first=c.first,
            c_stride=padded(c.rows.cols),
            dt_first=dt.first if dt else 0,
            dt_stride=padded(dt.rows.cols) if dt else 0,
            out_stride=padded(out.cols),
            dt_low=layer.dt_limit[0],
            dt_high=layer.dt_limit[1],
        )
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def delta(
        self, qkv: tuple[Columns, Columns, Columns], beta: Columns, a: Columns, layer: DeltaLayer
    ) -> TracedTensor:
        heads, builder = layer.a_log.shape[0], self._builder
        if layer.key_dim > MAX_STATES:
            raise Unsupported(f"keys of {layer.key_dim} columns")
        q, k, v = qkv
        for rows in (*qkv, beta, a):
            builder.expect(rows.rows, "a delta rule")
        out = builder.new(heads * layer.value_dim, "f32", v.rows)
        op = DeltaScan(
            q=q.rows.id,
            k=k.rows.id,
            v=v.rows.id,
            decay=a.rows.id,
            beta=beta.rows.id,
            a_log=builder.vector(layer.a_log),
            dt_bias=builder.vector(layer.dt_bias),
            state=self.state(layer.part, (heads, layer.key_dim, layer.value_dim), exact=True),
            out=out.id,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            num_heads=heads,
            groups=layer.key_heads,
            q_first=q.first,
            q_stride=padded(q.rows.cols),
            k_first=k.first,
            k_stride=padded(k.rows.cols),
            v_first=v.first,
            v_stride=padded(v.rows.cols),
            decay_first=a.first,
            decay_stride=padded(a.rows.cols),
            beta_first=beta.first,
            beta_stride=padded(beta.rows.cols),
            out_stride=padded(out.cols),
            by_key=layer.by_key,
            eps=layer.eps,
        )
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def mlstm(
        self,
        qkv: tuple[Columns, Columns, Columns],
        gates: tuple[TracedTensor, TracedTensor],
        layer: MlstmLayer,
    ) -> TracedTensor:
        heads, keys, values = layer.heads, layer.key_dim, layer.value_dim
        if (keys + 4) * (padded(values) + 16) > _MAX_MATRIX:
            raise Unsupported(f"matrix states of {keys} x {values} numbers")
        builder, (q, k, v), (into, keep) = self._builder, qkv, gates
        for rows in qkv:
            builder.expect(rows.rows, "a matrix memory")
        out = builder.new(heads * values, "f32", v.rows)
        op = MlstmScan(
            q=q.rows.id,
            k=k.rows.id,
            v=v.rows.id,
            into=into.id,
            keep=keep.id,
            state=self.state(layer.part, (heads, keys * values + keys + 1), exact=True),
            out=out.id,
            key_dim=keys,
            value_dim=values,
            num_heads=heads,
            q_first=q.first,
            q_stride=padded(q.rows.cols),
            k_first=k.first,
            k_stride=padded(k.rows.cols),
            v_first=v.first,
            v_stride=padded(v.rows.cols),
            gate_stride=padded(heads),
            out_stride=padded(out.cols),
            eps=layer.eps,
        )
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def gate(self, y: TracedTensor, gate: Columns, rule: GateRule) -> TracedTensor:
        builder = self._builder
        builder.expect(gate.rows, "a gate")
        if y.cols % rule.parts or y.cols // rule.parts > _MAX_GATED:
            raise Unsupported(f"gated rows of {y.cols} columns in {rule.parts} parts")
        out = builder.new(y.cols, None, y)
        op = GateRows(
            y=y.id,
            gate=gate.rows.id,
            weight=None if rule.weight is None else builder.vector(rule.weight),
            bias=None if rule.bias is None else builder.vector(rule.bias),
            out=out.id,
            cols=y.cols,
            parts=rule.parts,
            gate_first=gate.first,
            gate_stride=padded(gate.rows.cols),
            y_f32=y.dtype == "f32",
            function=Function[rule.function.upper()],
            norm=GateNorm[(rule.norm or "none").upper()],
            eps=rule.eps,
        )
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def weighted(
        self, a: TracedTensor, b: TracedTensor, a_factor: float, b_factor: float
    ) -> TracedTensor:
        builder = self._builder
        out = builder.new(a.cols, "f32", a)
        op = Add(
            a=a.id,
            b=b.id,
            out=out.id,
            cols=a.cols,
            a_f32=a.dtype == "f32",
            b_f32=b.dtype == "f32",
            out_f32=True,
            a_scale=a_factor,
            scale=b_factor,
        )
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def mix(
        self,
        x: TracedTensor,
        before: TracedTensor,
        share: torch.Tensor | TracedTensor,
        *,
        row_share: Columns | None = None,
        sums: bool = False,
    ) -> TracedTensor:
        builder = self._builder
        for rows in (x, before, *([row_share.rows] if row_share else [])):
            builder.expect(rows, "mixing tokens")
        out = builder.new(x.cols, None, x)
        op = TokenMix(
            x=x.id,
            before=before.id,
            share=None if isinstance(share, TracedTensor) else builder.vector(share),
            row_share=row_share.rows.id if row_share else None,
            gate=share.id if isinstance(share, TracedTensor) else None,
            out=out.id,
            cols=x.cols,
            row_share_first=row_share.first if row_share else 0,
            row_share_stride=padded(row_share.rows.cols) if row_share else 0,
            sums=sums,
        )
        builder.emit(op, out)
        return out

    def wkv(
        self, key: TracedTensor, value: TracedTensor, receptance: TracedTensor, layer: WkvLayer
    ) -> TracedTensor:
        builder = self._builder
        builder.expect(key, "WKV")
        out = builder.new(key.cols, None, key)
        op = WkvScan(
            key=key.id,
            value=value.id,
            receptance=receptance.id,
            time_decay=builder.vector(layer.time_decay),
            time_first=builder.vector(layer.time_first),
            state=self.state(layer.part, (3, key.cols), exact=True),
            out=out.id,
            channels=key.cols,
        )
        builder.emit(op, out)
        return out

    def rg_lru(self, x: TracedTensor, gate: TracedTensor, layer: RgLruLayer) -> TracedTensor:
        builder, (blocks, width) = self._builder, layer.takes[0].shape[:2]
        for rows in (x, gate):
            builder.expect(rows, "a recurrence")
        if width > MAX_STATES:
            raise Unsupported(f"gates in blocks of {width} columns")
        out = builder.new(x.cols, None, x)
        op = RgLruScan(
            x=x.id,
            gate=gate.id,
            param=builder.vector(layer.param),
            input_weight=builder.table(layer.takes[0]),
            input_bias=builder.table(layer.takes[1]),
            keep_weight=builder.table(layer.keeps[0]),
            keep_bias=builder.table(layer.keeps[1]),
            state=self.state(layer.part, (x.cols,), exact=True),
            out=out.id,
            num_blocks=blocks,
            width=width,
            weight_stride=padded(width * width),
            bias_stride=padded(width),
        )
        builder.emit(op, out)
        return out

    def wkv6(self, rows: Wkv6Rows, layer: Wkv6Layer) -> TracedTensor:
        builder, cols = self._builder, rows.key.cols
        width = cols // layer.heads
        if width > _MAX_WIDTH:
            raise Unsupported(f"heads of {width} columns")
        for each in (rows.query, rows.key, rows.value):
            builder.expect(each, "a matrix memory")
        assert (rows.decay is None) != (layer.time_decay is None)
        out = builder.new(cols, "f32", rows.key)
        op = Wkv6Scan(
            query=rows.query.id,
            key=rows.key.id,
            value=rows.value.id,
            time_decay=None if layer.time_decay is None else builder.vector(layer.time_decay),
            row_decay=None if rows.decay is None else rows.decay.id,
            time_first=builder.vector(layer.time_first),
            state=self.state(layer.part, (layer.heads, width, width), exact=True),
            out=out.id,
            cols=cols,
            num_heads=layer.heads,
            width=width,
        )
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def wkv7(self, rows: Wkv7Rows, layer: Wkv7Layer) -> TracedTensor:
        builder, cols = self._builder, rows.key.cols
        width = cols // layer.heads
        if width > _MAX_WIDTH:
            raise Unsupported(f"heads of {width} columns")
        for each in rows:
            builder.expect(each, "a matrix memory")
        inputs = Wkv7Inputs(
            query=rows.query.id,
            key=rows.key.id,
            rate=rows.rate.id,
            value=rows.value.id,
            k_a=builder.vector(layer.k_a),
            cols=cols,
        )
        recalled, out = builder.new(cols, "f32", rows.key), builder.new(cols, None, rows.key)
        scan = Wkv7Scan(
            inputs=inputs,
            decay=rows.decay.id,
            k_k=builder.vector(layer.k_k),
            state=self.state(layer.part, (layer.heads, width, width), exact=True),
            out=recalled.id,
            num_heads=layer.heads,
            width=width,
        )
        builder.emit(scan, out)
        weight, bias = layer.norm
        gated = Wkv7Out(
            inputs=inputs,
            recalled=recalled.id,
            gate=rows.gate.id,
            r_k=builder.vector(layer.r_k),
            weight=builder.vector(weight),
            bias=builder.vector(bias),
            out=out.id,
            width=width,
            eps=layer.eps,
        )
        builder.emit(gated, out)
        return out

    def take_columns(self, x: TracedTensor, order: Sequence[int]) -> TracedTensor:
        assert 0 <= min(order) <= max(order) < x.cols
        builder = self._builder
        builder.expect(x, "choosing columns")
        numbers = torch.from_numpy(np.array(order, np.int32))
        out = builder.new(len(order), None, x)
        op = TakeColumns(
            x=x.id,
            order=builder.graph.constant(as_bytes(numbers)),
            out=out.id,
            cols=out.cols,
            x_stride=padded(x.cols),
        )
        builder.emit(op, out)
        return out

    def join_columns(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
        if a.dtype != b.dtype:
            raise Unsupported(f"joining {a.dtype} rows and {b.dtype} rows")
        builder = self._builder
        out = builder.new(a.cols + b.cols, a.dtype, a)
        op = JoinColumns(a=a.id, b=b.id, out=out.id, cols=out.cols, a_cols=a.cols, b_cols=b.cols)
        builder.emit(op, out)
        return out

    def linear_heads(self, x: TracedTensor, weight: LinearWeight) -> TracedTensor:
        heads, outputs, inputs = weight.shape
        assert heads * inputs == x.cols
        builder = self._builder
        builder.expect(x, "products by head")
        out = builder.new(heads * outputs, None, x)
        products = HeadProducts(builder, x, heads, (inputs, outputs))
        products.multiply((x, inputs), weight, (out, outputs))
        return out

    def state(self, part: int, shape: tuple[int, ...], *, exact: bool = True) -> int:
        """Return all slots of a state; the memory must have this shape."""
        kept = self._states[part]
        kind = torch.float32 if exact or self._builder.dtype == "f32" else torch.bfloat16
        if kept.shape[1:] != shape or kept.dtype != kind or not kept.is_contiguous():
            found = list(kept.shape[1:])
            raise Unsupported(f"a state of {kept.dtype} {found} instead of {list(shape)}")
        return self._builder.graph.constant(kept.view(-1).view(torch.uint8).numpy())
