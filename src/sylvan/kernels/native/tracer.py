"""Traces a model's ops: each becomes typed ops of a graph, and nothing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch.nn import functional as F

from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import (
    ActivationKind,
    AttentionLayer,
    AttentionVariant,
    BlockPattern,
    Clamping,
    Communicator,
    Dtype,
    ExpertWeights,
    HeadNorm,
    HostFunction,
    IndexedRows,
    LatentParts,
    LinearWeight,
    Rope,
    Routing,
    Rows,
    TracedTensor,
    Unsupported,
)
from sylvan.kernels.compressed.parts import CompressedHeads, TracedEntries
from sylvan.kernels.matmul.pack import as_bytes
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.binding import Constants
from sylvan.kernels.native.builder import ProgramBuilder, function_of, glu_of, padded
from sylvan.kernels.native.collective import RankTracer
from sylvan.kernels.native.compressed import EntryTracer
from sylvan.kernels.native.experts import trace_chosen, trace_experts
from sylvan.kernels.native.graph import Graph, HostCall, ProgramLimits
from sylvan.kernels.native.heads import trace_grouped_linear
from sylvan.kernels.native.latent import trace_latent
from sylvan.kernels.native.lora import trace_lora, trace_lora_embedding
from sylvan.kernels.native.opset import (
    EVERY_BLOCK,
    Activation,
    Add,
    Attention,
    AttentionMerge,
    BlockMask,
    Cast,
    Clamp,
    Embed,
    KVPages,
    LayerNorm,
    PageFormat,
    ResidualStream,
    RmsNorm,
    RopeStore,
    Scale,
    ScaleRows,
    Softcap,
    Source,
    TakeRows,
    Xielu,
)
from sylvan.kernels.native.recurrent import StateTracer
from sylvan.kernels.native.sparse import SparseTracer
from sylvan.kernels.native.streams import trace_collapse, trace_expand, trace_spread
from sylvan.kernels.paged.cache import LayerPages, PageShape, SmallNumbers, allocate_pages
from sylvan.kernels.recurrent import RecurrentTracer
from sylvan.kernels.streams.parts import StreamParts

PARTS_MIB = 8  # memory for attention that is spread over threads
_TEXT_PAGE = 64  # tokens per page of texts with bidirectional attention
_IDS, _POSITIONS, _SAMPLE_ROWS, _TOKEN_TYPES = -1, -2, -3, -4
_SOURCES: Mapping[int, Source] = {
    _IDS: Source.IDS,
    _POSITIONS: Source.POSITIONS,
    _TOKEN_TYPES: Source.TOKEN_TYPES,
}
_FORMATS: Mapping[SmallNumbers | None, PageFormat] = {
    None: PageFormat.ROWS,
    "int8": PageFormat.INT8,
    "int4": PageFormat.INT4,
    "fp8_e4m3": PageFormat.FP8_E4M3,
    "fp8_e5m2": PageFormat.FP8_E5M2,
}


class NativeTracer:
    """Traces a forward pass as native ops.

    The model stays unchanged; `compile_graph` packs weights.

    `pages` are the layers' KV pages by attention index, `states` all slots of each recurrent state
    by its number. Unless a program computes `whole_steps`, no op depends on row indices.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        limits: ProgramLimits,
        pages: Mapping[int, LayerPages],
        constants: Constants,
        *,
        whole_steps: bool = True,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        self._whole_steps = whole_steps
        self._builder = ProgramBuilder(self, dtype, limits, constants)
        self._sparse = SparseTracer(self._builder)
        self._ranks = RankTracer(self._builder)
        self._states = StateTracer(self._builder, states) if states else None
        state_of = self._states.state if self._states else _no_state
        self._entries = EntryTracer(self._builder, pages, state_of)
        # Inputs of every step: ids, positions, token types; rows that need logits.
        self.input_ids = TracedTensor(self, _IDS, 1, "i32")
        self.positions = TracedTensor(self, _POSITIONS, 1, "i32")
        self.sample_rows = TracedTensor(self, _SAMPLE_ROWS, 1, "i32", "outputs")
        self.token_types = TracedTensor(self, _TOKEN_TYPES, 1, "i32")
        self._pages = pages
        self._texts: dict[tuple[int, ...], LayerPages] = {}
        self._parts: int | None = None

    @property
    def graph(self) -> Graph:
        """The graph traced so far."""
        return self._builder.graph

    @property
    def dtype(self) -> Dtype:
        """Type of the model's rows."""
        return self._builder.dtype

    def next_segment(self) -> int:
        """Start a new segment of the program, and return its number."""
        self._builder.segment += 1
        return self._builder.segment

    def input(self, cols: int, dtype: Dtype, rows: Rows = "tokens") -> TracedTensor:
        """A matrix that the caller fills before each run; columns beyond `cols` stay zero."""
        value = self._builder.repeated(cols, dtype, rows, 1)
        self.graph.inputs.append(value.id)
        return value

    def bound(self, cols: int, dtype: Dtype) -> TracedTensor:
        """A matrix without memory: each run binds its address (see `Program.bind`)."""
        value = self._builder.repeated(cols, dtype, "tokens", 1)
        self.external(value)
        return value

    def pin(self, value: TracedTensor) -> None:
        """Keep a value alive to the end of the program."""
        self.graph.pinned.add(value.id)

    def external(self, value: TracedTensor) -> None:
        """Leave a value out of the memory plan: the caller binds it (see `Program.bind`)."""
        self.graph.sizes[value.id] = 0
        self.graph.inputs.append(value.id)  # a unique id

    # ---- ops
    def embedding(
        self, ids: TracedTensor, weight: LinearWeight, scale: float, part_from: int | None
    ) -> TracedTensor:
        if ids.id not in _SOURCES:
            raise Unsupported("embedding of computed ids")
        out = self._builder.new(weight.shape[1], "f32")
        op = Embed(
            out=out.id,
            weight=self._builder.weight(weight),
            source=_SOURCES[ids.id],
            cols=out.cols,
            vocab_rows=weight.shape[0],
            first_row=part_from or 0,
            is_part=part_from is not None,
            scale=scale,
        )
        self._builder.emit(op, out, dtype=self.dtype)
        return out

    def rms_norm(
        self,
        x: TracedTensor,
        weight: torch.Tensor,
        eps: float,
        residual: TracedTensor | None,
        offset: float,
    ) -> tuple[TracedTensor, TracedTensor]:
        stream, total = self._stream(x, residual)
        out = self._builder.new(x.cols, None, x)
        scale = self._builder.vector(weight, offset)
        op = RmsNorm(stream=stream, weight=scale, out=out.id, cols=x.cols, eps=eps)
        self._builder.emit(op, out)
        return out, total

    def layer_norm(
        self,
        x: TracedTensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: TracedTensor | None,
    ) -> tuple[TracedTensor, TracedTensor]:
        stream, total = self._stream(x, residual)
        out = self._builder.new(x.cols, None, x)
        if weight is None:
            scale = self.graph.constant(
                as_bytes(F.pad(torch.ones(x.cols, dtype=torch.float32), (0, 32)))
            )
        else:
            scale = self._builder.vector(weight)
        op = LayerNorm(
            stream=stream,
            weight=scale,
            bias=None if bias is None else self._builder.vector(bias),
            out=out.id,
            cols=x.cols,
            eps=eps,
        )
        self._builder.emit(op, out)
        return out, total

    def linear(
        self,
        x: TracedTensor,
        weight: LinearWeight,
        bias: torch.Tensor | None,
        out_f32: bool,
        parts: int = 1,
    ) -> TracedTensor:
        shift = None if bias is None else self._builder.vector(bias)
        return self._builder.linear(x, weight, shift, out_f32=out_f32, parts=parts)

    def lora(self, x: TracedTensor, y: TracedTensor, layer: LoraLayer) -> TracedTensor:
        if not self._whole_steps:
            raise Unsupported("adapters on rows that are not those of a step")
        return trace_lora(self._builder, x, y, layer)

    def lora_embedding(self, ids: TracedTensor, y: TracedTensor, layer: LoraLayer) -> TracedTensor:
        if not self._whole_steps or ids.id != _IDS:
            raise Unsupported("adapters on ids that are not those of a step")
        return trace_lora_embedding(self._builder, y, layer)

    def glu(
        self, gate_up: TracedTensor, kind: ActivationKind, clamping: Clamping | None
    ) -> TracedTensor:
        self._builder.expect(gate_up, "glu")
        out = self._builder.new(gate_up.cols // 2, None, gate_up)
        self._builder.emit(glu_of(gate_up, out, kind, clamping), out)
        return out

    def activation(self, x: TracedTensor, kind: ActivationKind) -> TracedTensor:
        out = self._builder.new(x.cols, x.dtype, x)
        op = Activation(x=x.id, out=out.id, cols=x.cols, function=function_of(kind))
        self._builder.emit(op, out)
        return out

    def xielu(self, x: TracedTensor, numbers: Sequence[torch.Tensor]) -> TracedTensor:
        out = self._builder.new(x.cols, x.dtype, x)
        alpha_p, alpha_n, beta, eps = map(self._builder.vector, numbers)
        op = Xielu(
            x=x.id,
            alpha_p=alpha_p,
            alpha_n=alpha_n,
            beta=beta,
            eps=eps,
            out=out.id,
            cols=x.cols,
        )
        self._builder.emit(op, out)
        return out

    def host_call(self, x: TracedTensor, call: HostFunction) -> TracedTensor:
        out = self._builder.new(x.cols, None, x)
        self.graph.functions.append(call)
        number = len(self.graph.functions) - 1
        op = HostCall(
            x=x.id, out=out.id, function=number, cols=x.cols, x_f32=self._builder.is_wide(x)
        )
        self._builder.emit(op, out)
        return out

    @property
    def recurrent(self) -> RecurrentTracer:
        """The tracer of layers with recurrent states.

        Raises:
            Unsupported: The program has no memory for states.
        """
        if self._states is None:
            raise Unsupported("recurrent layers without memory for states")
        return self._states

    def attention(
        self,
        qkv: TracedTensor,
        layer: AttentionLayer,
        rope: Rope | None,
        norms: tuple[HeadNorm | None, HeadNorm | None],
        variant: AttentionVariant | None,
    ) -> TracedTensor:
        variant, (q_norm, k_norm) = variant or AttentionVariant(), norms
        self._builder.expect(qkv, "attention")
        kv = self._kv_pages(layer)
        width = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        assert qkv.cols == width + layer.num_kv_heads * layer.value_dim
        table, rotary_dim = self._rope(rope, layer.head_dim)
        q_weight, q_whole = self._head_norm(q_norm, layer.head_dim, layer.num_heads)
        k_weight, k_whole = self._head_norm(k_norm, layer.head_dim, layer.num_kv_heads)
        if variant.norm_last and (q_whole or k_whole):
            raise Unsupported("norms of all heads at once after rotary positions")
        by_distance = variant.slopes is not None or variant.biases is not None
        if not layer.causal and (variant.chunk or by_distance or layer.blocks):
            raise Unsupported("chunks, blocks or biases by distance in bidirectional attention")
        scales = layer.kv_scales if kv.format == PageFormat.FP8_E4M3 else None
        store = RopeStore(
            qkv=qkv.id,
            kv=kv,
            cos_sin=table,
            q_norm=q_weight,
            k_norm=k_weight,
            q_scales=self._optional(variant.query_scales),
            k_scales=self._optional(scales and scales.keys),
            v_scales=self._optional(scales and scales.values),
            rotary_dim=rotary_dim,
            interleaved=rope is not None and rope.interleaved,
            q_norm_whole=q_whole,
            k_norm_whole=k_whole,
            norm_last=variant.norm_last,
            q_eps=q_norm.eps if q_norm else 0.0,
            k_eps=k_norm.eps if k_norm else 0.0,
        )
        self._builder.emit(store, qkv)
        out = self._builder.new(layer.num_heads * layer.value_dim)
        distances = 0 if variant.biases is None else variant.biases.numel() // layer.num_heads
        if self._parts is None:
            self._parts = self.graph.constant(allocate(PARTS_MIB << 20))
        for op in (Attention, AttentionMerge):
            attention = op(
                qkv=qkv.id,
                kv=kv,
                out=out.id,
                parts=self._parts,
                sinks=self._optional(layer.sinks),
                slopes=self._optional(variant.slopes),
                blocks=_mask_of(layer.blocks),
                biases=self._optional(variant.biases),
                window=layer.window or 0,
                chunk=variant.chunk or 0,
                distances=distances,
                parts_mib=PARTS_MIB,
                scale=layer.scale,
                softcap=layer.softcap or 0.0,
            )
            self._builder.emit(attention, out)
        return out

    def latent_attention(
        self, q: TracedTensor, kv: TracedTensor, parts: LatentParts, layer: AttentionLayer
    ) -> TracedTensor:
        pages = self._layer_pages(layer)
        if not pages.shape.shared:
            raise Unsupported("latent attention over pages that do not share keys and values")
        if (q.rows, kv.rows) != ("tokens", "tokens"):
            raise Unsupported("latent attention on rows other than the step's")
        variant = AttentionVariant(query_scales=parts.query_scales)
        return trace_latent(
            self._builder,
            (q, kv),
            parts,
            lambda rows: self.attention(rows, layer, None, (None, None), variant),
        )

    def sparse_attention(
        self,
        q: TracedTensor,
        kv: TracedTensor,
        parts: LatentParts,
        layer: AttentionLayer,
        index: IndexedRows | TracedTensor,
    ) -> tuple[TracedTensor, TracedTensor]:
        pages = self._pages.get(layer.index)
        if pages is None or not self._whole_steps:
            raise Unsupported("sparse attention of a layer without pages")
        return self._sparse.trace((q, kv), parts, layer, pages, index)

    def compressed_attention(
        self, q: TracedTensor, k: TracedTensor, heads: CompressedHeads, far: TracedEntries | None
    ) -> TracedTensor:
        if (q.rows, k.rows) != ("tokens", "tokens") or not self._whole_steps:
            raise Unsupported("compressed attention of other rows than the step's")
        return self._entries.trace(q, k, heads, far)

    def grouped_linear(self, x: TracedTensor, weight: LinearWeight, groups: int) -> TracedTensor:
        return trace_grouped_linear(self._builder, x, weight, groups)

    def spread_streams(self, x: TracedTensor, count: int) -> TracedTensor:
        return trace_spread(self._builder, x, count)

    def collapse_streams(
        self, streams: TracedTensor, parts: StreamParts, *, mixes: bool
    ) -> tuple[TracedTensor, TracedTensor | None]:
        return trace_collapse(self._builder, streams, parts, mixes=mixes)

    def expand_streams(
        self, streams: TracedTensor, out: TracedTensor, mix: TracedTensor
    ) -> TracedTensor:
        return trace_expand(self._builder, streams, out, mix)

    def all_reduce(
        self,
        x: TracedTensor,
        ranks: Communicator,
        bias: torch.Tensor | None,
        like: TracedTensor,
    ) -> TracedTensor:
        return self._ranks.all_reduce(x, ranks, bias, like)

    def all_gather(self, x: TracedTensor, ranks: Communicator, cols: int) -> TracedTensor:
        return self._ranks.all_gather(x, ranks, cols)

    def take_rows(self, x: TracedTensor, rows: TracedTensor) -> TracedTensor:
        if rows.id != _SAMPLE_ROWS:
            raise Unsupported("rows other than the batch's sample rows")
        out = self._builder.repeated(x.cols, x.dtype, "outputs", 1)
        self._builder.emit(TakeRows(x=x.id, out=out.id, cols=x.cols), out)
        return out

    def add(self, a: TracedTensor, b: TracedTensor, scale: float) -> TracedTensor:
        if (a.cols, a.rows, a.times) != (b.cols, b.rows, b.times):
            raise Unsupported("adding matrices of different shapes")
        out = self._builder.new(a.cols, a.dtype, a)
        op = Add(
            a=a.id,
            b=b.id,
            out=out.id,
            cols=a.cols,
            a_f32=self._builder.is_wide(a),
            b_f32=self._builder.is_wide(b),
            out_f32=self._builder.is_wide(a),
            scale=scale,
        )
        self._builder.emit(op, out, dtype=self.dtype)
        return out

    def cast(self, x: TracedTensor) -> TracedTensor:
        if x.dtype == self.dtype:
            return x
        out = self._builder.new(x.cols, None, x)
        self._builder.emit(Cast(x=x.id, out=out.id, cols=x.cols), out)
        return out

    def scale(self, x: TracedTensor, factor: float) -> TracedTensor:
        out = self._builder.new(x.cols, x.dtype, x)
        op = Scale(x=x.id, out=out.id, cols=x.cols, f32=self._builder.is_wide(x), factor=factor)
        self._builder.emit(op, out, dtype=self.dtype)
        return out

    def softcap(self, x: TracedTensor, cap: float) -> TracedTensor:
        out = self._builder.new(x.cols, x.dtype, x)
        op = Softcap(x=x.id, out=out.id, cols=x.cols, f32=self._builder.is_wide(x), cap=cap)
        self._builder.emit(op, out, dtype=self.dtype)
        return out

    def clamp(self, x: TracedTensor, limit: float) -> TracedTensor:
        self._builder.expect(x, "clamping")
        out = self._builder.new(x.cols, None, x)
        self._builder.emit(Clamp(x=x.id, out=out.id, cols=x.cols, limit=limit), out)
        return out

    def scale_rows(self, x: TracedTensor, factors: TracedTensor) -> TracedTensor:
        self._builder.expect(x, "scaling")
        self._builder.expect(factors, "scaling")
        out = self._builder.new(x.cols, None, x)
        self._builder.emit(ScaleRows(x=x.id, factors=factors.id, out=out.id, cols=x.cols), out)
        return out

    def experts(
        self,
        x: TracedTensor,
        logits: TracedTensor,
        routing: Routing,
        weights: ExpertWeights,
        load: torch.Tensor | None,
    ) -> TracedTensor:
        memory = None
        if weights.expert_ranks is not None:
            memory = self._ranks.memory(weights.expert_ranks.ranks, padded(x.cols))
        return trace_experts(self._builder, (x, logits), routing, weights, load, memory)

    def chosen_experts(
        self, x: TracedTensor, top_k: int, weights: ExpertWeights
    ) -> tuple[TracedTensor, TracedTensor, TracedTensor]:
        """Trace experts that the caller chooses; see `trace_chosen`.

        Returns: ids and weights, to be bound, and the result.
        """
        return trace_chosen(self._builder, x, top_k, weights)

    # ---- parts
    def _optional(self, vector: torch.Tensor | None) -> int | None:
        return None if vector is None else self._builder.vector(vector)

    def _stream(
        self, x: TracedTensor, residual: TracedTensor | None
    ) -> tuple[ResidualStream, TracedTensor]:
        """Return the input of a norm, and the residual sum that it writes."""
        if residual is None:
            wide = x.dtype == "f32"
            return ResidualStream(residual=x.id) if wide else ResidualStream(x=x.id), x
        if x.dtype != self.dtype or x.cols != residual.cols:
            raise Unsupported(f"adding {x.dtype} rows to a residual of {residual.dtype}")
        if residual.dtype == "f32":
            return ResidualStream(residual=residual.id, x=x.id), residual
        total = self._builder.new(x.cols, "f32", x)
        return ResidualStream(residual=total.id, x=x.id, base=residual.id), total

    def _kv_pages(self, layer: AttentionLayer) -> KVPages:
        pages = self._layer_pages(layer)
        key_step, value_step = pages.steps
        return KVPages(
            keys=self.graph.constant(pages.keys),
            values=self.graph.constant(pages.values),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            page_size=pages.shape.page_size,
            format=PageFormat.SHARED if pages.shape.shared else _FORMATS[pages.shape.small],
            whole_text=not layer.causal,
            table=pages.group,
            key_step=key_step,
            value_step=value_step,
        )

    def _layer_pages(self, layer: AttentionLayer) -> LayerPages:
        pages = self._pages.get(layer.index) if layer.causal else self._text_pages(layer)
        if pages is None:
            raise Unsupported("attention of a layer without pages")
        shape = pages.shape
        mine = layer.num_kv_heads, layer.head_dim, layer.value_dim
        if shape.tokens or mine != (shape.num_kv_heads, shape.head_dim, shape.value_dim):
            raise Unsupported("attention heads of another size than the KV pool's")
        if max(layer.head_dim, layer.value_dim) > self._builder.constants.max_head:
            raise Unsupported(f"heads of {layer.head_dim} columns")
        return pages

    def _text_pages(self, layer: AttentionLayer) -> LayerPages:
        """Allocate pages for the texts of one step; all layers of a shape share them."""
        key = layer.num_kv_heads, layer.head_dim, layer.value_dim
        if key not in self._texts:
            shape = PageShape(
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                value_dim=layer.value_dim,
                page_size=_TEXT_PAGE,
                dtype=torch.bfloat16 if self._builder.dtype == "bf16" else torch.float32,
            )
            limits = self.graph.limits
            count = -(-limits.max_tokens // _TEXT_PAGE) + limits.max_outputs
            self._texts[key] = allocate_pages(shape, count).layers[0]
        return self._texts[key]

    def _rope(self, rope: Rope | None, head_dim: int) -> tuple[int | None, int]:
        if rope is None:
            return None, 0
        dim = rope.cos_sin.shape[1]
        if dim % 2 or dim > head_dim:
            raise Unsupported(f"a rotary table of {dim} columns for heads of {head_dim}")
        return self._builder.vector(rope.cos_sin), dim

    def _head_norm(
        self, norm: HeadNorm | None, head_dim: int, heads: int
    ) -> tuple[int | None, bool]:
        """The weight of a head norm, and whether it spans all heads."""
        if norm is None:
            return None, False
        if norm.over is not None:
            raise Unsupported("head norms over the heads of several ranks")
        size = norm.weight.numel()
        if size not in (head_dim, heads * head_dim):
            raise Unsupported(f"a head norm of {size} weights for {heads} heads of {head_dim}")
        return self._builder.vector(norm.weight, norm.offset), size != head_dim


def _no_state(part: int, shape: tuple[int, ...]) -> int:
    raise Unsupported("entries of several tokens without memory for states")


def _mask_of(blocks: BlockPattern | None) -> BlockMask:
    return EVERY_BLOCK if blocks is None else BlockMask(**asdict(blocks))
