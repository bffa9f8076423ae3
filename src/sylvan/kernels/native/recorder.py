"""Notes a model's ops as native kernel calls over static buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import (
    ActivationKind,
    AttentionLayer,
    Dtype,
    ExpertWeights,
    HeadNorm,
    LatentParts,
    LinearWeight,
    Rope,
    Routing,
    Rows,
    Unsupported,
    Value,
)
from sylvan.kernels.matmul.pack import as_bytes
from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.binding import FUNCTIONS, Constants, Kind
from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.experts import record_chosen, record_experts
from sylvan.kernels.native.latent import record_latent
from sylvan.kernels.native.plan import Draft, Ref
from sylvan.kernels.native.sheet import WEIGHT_KINDS, RecorderLimits, Sheet, padded
from sylvan.kernels.paged.cache import LayerPages, PageShape, allocate_pages

PARTS_MIB = 8  # room for attention spread over threads
_TEXT_PAGE = 64  # tokens of a page of texts that attend both ways
_IDS, _POSITIONS, _SAMPLE_ROWS, _TOKEN_TYPES = -1, -2, -3, -4
_LOOKED_UP = (_IDS, _POSITIONS, _TOKEN_TYPES)


class NativeRecorder:
    """See `kernels.api.Recorder`. What it notes is on its sheet; see there for weights.

    `pages` are the layers' KV pages by attention index.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        limits: RecorderLimits,
        pages: Mapping[int, LayerPages],
        constants: Constants,
        *,
        rehearsal: bool = False,
    ) -> None:
        self._sheet = Sheet(self, dtype, limits, constants, rehearsal=rehearsal)
        self._limits = limits
        # Inputs of every step: ids, positions, types of its tokens; rows whose logits are wanted.
        self.input_ids = Value(self, _IDS, 1, "i32")
        self.positions = Value(self, _POSITIONS, 1, "i32")
        self.sample_rows = Value(self, _SAMPLE_ROWS, 1, "i32", "outputs")
        self.token_types = Value(self, _TOKEN_TYPES, 1, "i32")
        self._pages = pages
        self._texts: dict[tuple[int, ...], LayerPages] = {}
        self._parts: Ref = None

    @property
    def draft(self) -> Draft:
        """What has been noted so far."""
        return self._sheet.draft

    @property
    def copies(self) -> Sequence[WeightCopy]:
        """Of all weights met so far: see `Sheet.copies`."""
        return self._sheet.copies

    @property
    def dtype(self) -> Dtype:
        """Of the model's rows."""
        return self._sheet.dtype

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights met so far, as kernels read them."""
        return self._sheet.weight_bytes

    def input(self, cols: int, dtype: Dtype, rows: Rows = "tokens") -> Value:
        """A matrix that the caller fills before each run; columns beyond `cols` stay zero."""
        value = self._sheet.repeated(cols, dtype, rows, 1)
        self.draft.inputs.append(value.id)
        return value

    def bound(self, cols: int, dtype: Dtype) -> Value:
        """A matrix without memory: each run is told where it lies (see `Program.bind`)."""
        value = self._sheet.repeated(cols, dtype, "tokens", 1)
        self.elsewhere(value)
        return value

    def pin(self, value: Value) -> None:
        """Keep a value to the end of the program."""
        self.draft.pinned.add(value.id)

    def elsewhere(self, value: Value) -> None:
        """A value gets no memory: whoever runs the program binds it (see `Program.bind`)."""
        self.draft.sizes[value.id] = 0
        self.draft.inputs.append(value.id)  # a number that no other value has

    # ---- ops
    def embedding(self, ids: Value, weight: LinearWeight, scale: float) -> Value:
        """See `Recorder.embedding`."""
        if ids.id not in _LOOKED_UP:
            raise Unsupported("embedding of computed ids")
        placed = self._sheet.weight(weight)
        packed, (data, col_scale, _) = placed.packed, placed.refs
        out = self._sheet.new(packed.cols, "f32")
        kind = WEIGHT_KINDS.index(packed.kind)
        source = _LOOKED_UP.index(ids.id)
        sizes = packed.cols, source, packed.words, kind, packed.group, packed.rows
        buffers = out.id, data, col_scale
        self._sheet.note(Kind.EMBED, out, buffers, sizes, (scale,), type_=self._sheet.dtype)
        return out

    def rms_norm(
        self, x: Value, weight: torch.Tensor, eps: float, residual: Value | None, offset: float
    ) -> tuple[Value, Value]:
        """See `Recorder.rms_norm`."""
        stream, other, total = self._stream(x, residual)
        out = self._sheet.new(x.cols, None, x)
        buffers = (*stream, self._sheet.vector(weight, offset), out.id, None, other)
        self._sheet.note(Kind.RMS_NORM, out, buffers, (x.cols,), (eps,))
        return out, total

    def layer_norm(
        self,
        x: Value,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: Value | None,
    ) -> tuple[Value, Value]:
        """See `Recorder.layer_norm`."""
        stream, other, total = self._stream(x, residual)
        out = self._sheet.new(x.cols, None, x)
        scale = self.draft.constant(as_bytes(F.pad(torch.ones(x.cols), (0, 32))))
        if weight is not None:
            scale = self._sheet.vector(weight)
        shift = None if bias is None else self._sheet.vector(bias)
        buffers = (*stream, scale, out.id, shift, other)
        self._sheet.note(Kind.LAYER_NORM, out, buffers, (x.cols,), (eps,))
        return out, total

    def linear(
        self, x: Value, weight: LinearWeight, bias: torch.Tensor | None, out_f32: bool
    ) -> Value:
        """See `Recorder.linear`."""
        shift = None if bias is None else self._sheet.vector(bias)
        return self._sheet.multiply(x, self._sheet.weight(weight), shift, out_f32=out_f32)

    def lora(self, x: Value, y: Value, layer: LoraLayer) -> Value:
        """See `Recorder.lora`."""
        raise Unsupported("low-rank adapters")

    def glu(self, gate_up: Value, kind: ActivationKind) -> Value:
        """See `Recorder.glu`."""
        self._sheet.expect(gate_up, "glu")
        out = self._sheet.new(gate_up.cols // 2, None, gate_up)
        sizes = out.cols, FUNCTIONS.index(kind)
        self._sheet.note(Kind.GLU, out, (gate_up.id, out.id), sizes)
        return out

    def activation(self, x: Value, kind: ActivationKind) -> Value:
        """See `Recorder.activation`."""
        out = self._sheet.new(x.cols, x.dtype, x)
        self._sheet.note(Kind.ACTIVATION, out, (x.id, out.id), (x.cols, FUNCTIONS.index(kind)))
        return out

    def attention(
        self,
        qkv: Value,
        layer: AttentionLayer,
        rope: Rope | None,
        q_norm: HeadNorm | None,
        k_norm: HeadNorm | None,
    ) -> Value:
        """See `Recorder.attention`."""
        self._sheet.expect(qkv, "attention")
        pages = self._layer_pages(layer)
        width = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        assert qkv.cols == width + layer.num_kv_heads * layer.value_dim
        keys, values = (self.draft.constant(x) for x in (pages.keys, pages.values))
        dims = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
        dims = (*dims, pages.shape.page_size)
        table, turning = self._rope(rope, layer.head_dim)
        q_weight, q_at_once = self._head_norm(q_norm, layer.head_dim, layer.num_heads)
        k_weight, k_at_once = self._head_norm(k_norm, layer.head_dim, layer.num_kv_heads)
        eps = [n.eps if n else 0.0 for n in (q_norm, k_norm)]
        interleaved = int(rope is not None and rope.interleaved)
        store = (qkv.id, keys, values, table, q_weight, k_weight)
        how = int(not layer.causal), 2 if pages.shape.shared else int(pages.shape.int8)
        where = 0, pages.group, *pages.steps
        sizes = (*dims, turning, interleaved, q_at_once, k_at_once, *how, *where)
        self._sheet.note(Kind.ROPE_STORE, qkv, store, sizes, (*eps,))
        out = self._sheet.new(layer.num_heads * layer.value_dim)
        if self._parts is None:
            self._parts = self.draft.constant(allocate(PARTS_MIB << 20))
        sinks = None if layer.sinks is None else self._sheet.vector(layer.sinks)
        buffers = (qkv.id, keys, values, out.id, self._parts, sinks)
        sizes = (*dims, layer.window or 0, PARTS_MIB, 0, 0, *how, *where)
        for kind in (Kind.ATTENTION, Kind.ATTENTION_MERGE):
            self._sheet.note(kind, out, buffers, sizes, (layer.scale, layer.softcap or 0.0))
        return out

    def latent_attention(
        self, q: Value, kv: Value, parts: LatentParts, layer: AttentionLayer
    ) -> Value:
        """See `Recorder.latent_attention`."""
        pages = self._layer_pages(layer)
        if not pages.shape.shared:
            raise Unsupported("latent attention over pages that do not share keys and values")
        if (q.rows, kv.rows) != ("tokens", "tokens"):
            raise Unsupported("latent attention of other rows than the step's")
        return record_latent(
            self._sheet, (q, kv), parts, lambda rows: self.attention(rows, layer, None, None, None)
        )

    def take_rows(self, x: Value, rows: Value) -> Value:
        """See `Recorder.take_rows`."""
        if rows.id != _SAMPLE_ROWS:
            raise Unsupported("rows other than the batch's sample rows")
        out = self._sheet.repeated(x.cols, x.dtype, "outputs", 1)
        self._sheet.note(Kind.TAKE_ROWS, out, (x.id, out.id), (x.cols,))
        return out

    def add(self, a: Value, b: Value, scale: float) -> Value:
        """See `Recorder.add`."""
        if (a.cols, a.rows, a.times) != (b.cols, b.rows, b.times):
            raise Unsupported("adding matrices of different shapes")
        out = self._sheet.new(a.cols, a.dtype, a)
        wide = [int(v.dtype == "f32" != self._sheet.dtype) for v in (a, b)]
        buffers = a.id, b.id, out.id
        self._sheet.note(Kind.ADD, out, buffers, (a.cols, *wide), (scale,), type_=self._sheet.dtype)
        return out

    def cast(self, x: Value) -> Value:
        """See `Recorder.cast`."""
        if x.dtype == self._sheet.dtype:
            return x
        out = self._sheet.new(x.cols, None, x)
        self._sheet.note(Kind.CAST, out, (x.id, out.id), (x.cols,))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """See `Recorder.scale`."""
        return self._scalar(Kind.SCALE, x, factor)

    def softcap(self, x: Value, cap: float) -> Value:
        """See `Recorder.softcap`."""
        return self._scalar(Kind.SOFTCAP, x, cap)

    def scale_rows(self, x: Value, factors: Value) -> Value:
        """See `Recorder.scale_rows`."""
        self._sheet.expect(x, "scaling")
        self._sheet.expect(factors, "scaling")
        out = self._sheet.new(x.cols, None, x)
        self._sheet.note(Kind.SCALE_ROWS, out, (x.id, factors.id, out.id), (x.cols,))
        return out

    def experts(
        self,
        x: Value,
        logits: Value,
        routing: Routing,
        weights: ExpertWeights,
        load: torch.Tensor | None,
    ) -> Value:
        """See `Recorder.experts`."""
        return record_experts(self._sheet, (x, logits), routing, weights, load)

    def chosen_experts(
        self, x: Value, top_k: int, weights: ExpertWeights
    ) -> tuple[Value, Value, Value]:
        """Experts that the caller chooses: their numbers and shares, to be bound, and the result.

        See `record_chosen`.
        """
        return record_chosen(self._sheet, x, top_k, weights)

    # ---- parts
    def _scalar(self, kind: Kind, x: Value, scalar: float) -> Value:
        out = self._sheet.new(x.cols, x.dtype, x)
        wide = int(x.dtype == "f32" != self._sheet.dtype)
        self._sheet.note(
            kind, out, (x.id, out.id), (x.cols, wide), (scalar,), type_=self._sheet.dtype
        )
        return out

    def _stream(self, x: Value, residual: Value | None) -> tuple[tuple[Ref, Ref], Ref, Value]:
        """The residual and addend buffers of a norm, what else is added, and the sum they make."""
        if residual is None:
            alone = x.dtype == "f32"
            return ((x.id, None) if alone else (None, x.id)), None, x
        if x.dtype != self._sheet.dtype or x.cols != residual.cols:
            raise Unsupported(f"adding {x.dtype} rows to a residual of {residual.dtype}")
        if residual.dtype == "f32":
            return (residual.id, x.id), None, residual
        total = self._sheet.new(x.cols, "f32", x)
        return (total.id, x.id), residual.id, total

    def _layer_pages(self, layer: AttentionLayer) -> LayerPages:
        pages = self._pages.get(layer.index) if layer.causal else self._text_pages(layer)
        if pages is None:
            raise Unsupported("attention of a layer without pages")
        shape = pages.shape
        mine = layer.num_kv_heads, layer.head_dim, layer.value_dim
        if mine != (shape.num_kv_heads, shape.head_dim, shape.value_dim):
            raise Unsupported("attention heads that differ from the KV pool's")
        if max(layer.head_dim, layer.value_dim) > self._sheet.constants.max_head:
            raise Unsupported(f"heads of {layer.head_dim} columns")
        return pages

    def _text_pages(self, layer: AttentionLayer) -> LayerPages:
        """For the texts of one step; all layers of a shape use the same."""
        key = layer.num_kv_heads, layer.head_dim, layer.value_dim
        if key not in self._texts:
            shape = PageShape(
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                value_dim=layer.value_dim,
                page_size=_TEXT_PAGE,
                dtype=torch.bfloat16 if self._sheet.dtype == "bf16" else torch.float32,
            )
            limits = self._limits
            count = -(-limits.max_tokens // _TEXT_PAGE) + limits.max_outputs
            self._texts[key] = allocate_pages(shape, count).layers[0]
        return self._texts[key]

    def _rope(self, rope: Rope | None, head_dim: int) -> tuple[Ref, int]:
        if rope is None:
            return None, 0
        dim = rope.cos_sin.shape[1]
        if dim % 2 or dim > head_dim:
            raise Unsupported(f"a rotary table of {dim} columns for heads of {head_dim}")
        return self._sheet.vector(rope.cos_sin), dim

    def _head_norm(self, norm: HeadNorm | None, head_dim: int, heads: int) -> tuple[Ref, int]:
        """The weight, and whether it is over all heads at once."""
        if norm is None:
            return None, 0
        size = norm.weight.numel()
        if size not in (head_dim, heads * head_dim):
            raise Unsupported(f"a head norm of {size} weights for {heads} heads of {head_dim}")
        return self._sheet.vector(norm.weight, norm.offset), int(size != head_dim)


def view(memory: Bytes, rows: int, cols: int, dtype: Dtype) -> torch.Tensor:
    """The first rows of a buffer as a tensor, without copying. Shape: (rows, cols)."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    width = padded(cols)
    used = memory[: rows * width * kind.itemsize].view(np.int16 if kind.itemsize == 2 else np.int32)
    return torch.from_numpy(used).view(kind).view(rows, width)[:, :cols]
