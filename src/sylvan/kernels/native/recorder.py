"""Notes a model's ops as native kernel calls over static buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch.nn import functional as F

from sylvan.kernels.api import (
    ActivationKind,
    AttentionLayer,
    Dtype,
    HeadNorm,
    LinearWeight,
    Rope,
    Rows,
    Unsupported,
    Value,
)
from sylvan.kernels.matmul.pack import PackedWeight, as_bytes, pack, pack_nothing
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.binding import FUNCTIONS, Constants, Kind
from sylvan.kernels.native.plan import Call, Draft, Ref
from sylvan.kernels.paged.cache import LayerPages

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"f32": 4, "bf16": 2, "i32": 4})
_TILE_ROWS = 32  # rows of a matrix tile: buffers are long enough for the last one to be whole
_PARTS_MIB = 8  # room for attention spread over threads
_IDS, _POSITIONS, _SAMPLE_ROWS = -1, -2, -3
_KINDS = ("dense", "int8", "int4")
_LINEAR = (Kind.LINEAR, Kind.LINEAR_INT8, Kind.LINEAR_INT4)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecorderLimits:
    """What the program's buffers hold."""

    max_tokens: int
    max_outputs: int


def padded(cols: int) -> int:
    """Columns of a row in memory."""
    return -(-cols // 32) * 32


class NativeRecorder:
    """See `kernels.api.Recorder`. Weights are packed as they are met, each once.

    `pages` are the layers' KV pages by attention index. The memory of a torch parameter is freed
    when it has been packed: the model cannot compute with tensors afterwards. A rehearsal packs
    nothing and frees nothing; it tells whether a model can be recorded.
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
        if dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported(f"rows of {dtype}")
        self.draft = Draft()
        # Inputs of every step: ids and positions of its tokens, rows whose logits are wanted.
        self.input_ids = Value(self, _IDS, 1, "i32")
        self.positions = Value(self, _POSITIONS, 1, "i32")
        self.sample_rows = Value(self, _SAMPLE_ROWS, 1, "i32", "outputs")
        self.weight_bytes = 0
        self._torch_dtype = dtype
        self._dtype: Dtype = "bf16" if dtype == torch.bfloat16 else "f32"
        self._limits, self._pages, self._constants = limits, pages, constants
        self._rehearsal = rehearsal
        self._packed: dict[object, tuple[PackedWeight, tuple[Ref, Ref, Ref]]] = {}
        self._kept: list[LinearWeight] = []
        self._vectors: dict[tuple[int, float], tuple[object, Ref]] = {}
        self._quantised: dict[tuple[int, str, int], tuple[Ref, ...]] = {}
        self._parts: Ref = None

    def input(self, cols: int, dtype: Dtype, rows: Rows = "tokens") -> Value:
        """A matrix that the caller fills before each run; columns beyond `cols` stay zero."""
        value = self._new(cols, dtype, rows)
        self.draft.inputs.append(value.id)
        return value

    def pin(self, value: Value) -> None:
        """Keep a value to the end of the program."""
        self.draft.pinned.add(value.id)

    # ---- ops
    def embedding(self, ids: Value, weight: LinearWeight, scale: float) -> Value:
        """See `Recorder.embedding`."""
        if ids.id not in (_IDS, _POSITIONS):
            raise Unsupported("embedding of computed ids")
        packed, (data, col_scale, _) = self._weight(weight)
        out = self._new(packed.cols, "f32")
        sizes = packed.cols, int(ids.id == _POSITIONS), packed.words, _KINDS.index(packed.kind)
        self._call(Kind.EMBED, out, (out.id, data, col_scale), (*sizes, packed.group), (scale,))
        return out

    def rms_norm(
        self, x: Value, weight: torch.Tensor, eps: float, residual: Value | None, offset: float
    ) -> tuple[Value, Value]:
        """See `Recorder.rms_norm`."""
        stream, total = self._stream(x, residual)
        out = self._new(x.cols, self._dtype, x.rows)
        buffers = (*stream, self._vector(weight, offset), out.id)
        self._call(Kind.RMS_NORM, out, buffers, (x.cols,), (eps,))
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
        stream, total = self._stream(x, residual)
        out = self._new(x.cols, self._dtype, x.rows)
        scale = self.draft.constant(as_bytes(F.pad(torch.ones(x.cols), (0, 32))))
        if weight is not None:
            scale = self._vector(weight)
        shift = None if bias is None else self._vector(bias)
        buffers = (*stream, scale, out.id, shift)
        self._call(Kind.LAYER_NORM, out, buffers, (x.cols,), (eps,))
        return out, total

    def linear(
        self, x: Value, weight: LinearWeight, bias: torch.Tensor | None, out_f32: bool
    ) -> Value:
        """See `Recorder.linear`."""
        self._expect(x, "linear")
        packed, (data, col_scale, sums) = self._weight(weight)
        if packed.cols != x.cols:
            raise Unsupported(f"a linear of {packed.cols} inputs on rows of {x.cols}")
        out = self._new(packed.rows, "f32" if out_f32 else self._dtype, x.rows)
        source: Ref = x.id
        row_scale: Ref = None
        row_bytes = padded(x.cols) * ELEMENT_BYTES[self._dtype]
        if packed.kind != "dense":
            row_bytes = packed.words * (4 if packed.kind == "int8" else 8)
            source, row_scale, row_sums = self._quantise(x, packed, row_bytes)
            sums = sums if packed.kind == "int8" else row_sums
        shift = None if bias is None else self._vector(bias)
        buffers = (source, data, shift, out.id, row_scale, col_scale, sums)
        sizes = packed.words, padded(packed.rows), int(out.dtype == "f32" != self._dtype)
        kind = _LINEAR[_KINDS.index(packed.kind)]
        self._call(kind, out, buffers, (*sizes, packed.group, row_bytes), type_=self._dtype)
        return out

    def glu(self, gate_up: Value, kind: ActivationKind) -> Value:
        """See `Recorder.glu`."""
        self._expect(gate_up, "glu")
        out = self._new(gate_up.cols // 2, gate_up.dtype, gate_up.rows)
        sizes = out.cols, FUNCTIONS.index(kind)
        self._call(Kind.GLU, out, (gate_up.id, out.id), sizes)
        return out

    def activation(self, x: Value, kind: ActivationKind) -> Value:
        """See `Recorder.activation`."""
        out = self._new(x.cols, x.dtype, x.rows)
        self._call(Kind.ACTIVATION, out, (x.id, out.id), (x.cols, FUNCTIONS.index(kind)))
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
        self._expect(qkv, "attention")
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
        sizes = (*dims, turning, interleaved, q_at_once, k_at_once)
        self._call(Kind.ROPE_STORE, qkv, store, sizes, (*eps,))
        out = self._new(layer.num_heads * layer.value_dim, self._dtype)
        if self._parts is None:
            self._parts = self.draft.constant(allocate(_PARTS_MIB << 20))
        sinks = None if layer.sinks is None else self._vector(layer.sinks)
        buffers = (qkv.id, keys, values, out.id, self._parts, sinks)
        sizes = (*dims, layer.window or 0, _PARTS_MIB)
        for kind in (Kind.ATTENTION, Kind.ATTENTION_MERGE):
            self._call(kind, out, buffers, sizes, (layer.scale, layer.softcap or 0.0))
        return out

    def take_rows(self, x: Value, rows: Value) -> Value:
        """See `Recorder.take_rows`."""
        if rows.id != _SAMPLE_ROWS:
            raise Unsupported("rows other than the batch's sample rows")
        out = self._new(x.cols, x.dtype, "outputs")
        self._call(Kind.TAKE_ROWS, out, (x.id, out.id), (x.cols,))
        return out

    def add(self, a: Value, b: Value, scale: float) -> Value:
        """See `Recorder.add`."""
        if a.cols != b.cols or a.rows != b.rows:
            raise Unsupported("adding matrices of different shapes")
        out = self._new(a.cols, a.dtype, a.rows)
        wide = [int(v.dtype == "f32" != self._dtype) for v in (a, b)]
        buffers = a.id, b.id, out.id
        self._call(Kind.ADD, out, buffers, (a.cols, *wide), (scale,), type_=self._dtype)
        return out

    def cast(self, x: Value) -> Value:
        """See `Recorder.cast`."""
        if x.dtype == self._dtype:
            return x
        out = self._new(x.cols, self._dtype, x.rows)
        self._call(Kind.CAST, out, (x.id, out.id), (x.cols,))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """See `Recorder.scale`."""
        return self._scalar(Kind.SCALE, x, factor)

    def softcap(self, x: Value, cap: float) -> Value:
        """See `Recorder.softcap`."""
        return self._scalar(Kind.SOFTCAP, x, cap)

    # ---- parts
    def _scalar(self, kind: Kind, x: Value, scalar: float) -> Value:
        out = self._new(x.cols, x.dtype, x.rows)
        wide = int(x.dtype == "f32" != self._dtype)
        self._call(kind, out, (x.id, out.id), (x.cols, wide), (scalar,), type_=self._dtype)
        return out

    def _call(
        self,
        kind: Kind,
        like: Value,
        buffers: tuple[Ref, ...],
        sizes: tuple[int, ...],
        scalars: tuple[float, ...] = (),
        *,
        type_: Dtype | None = None,
    ) -> None:
        """Note an op over the rows of `like`."""
        row_type = type_ or (self._dtype if kind is Kind.EMBED else like.dtype)
        self.draft.calls.append(Call(kind, like.rows, row_type, buffers, sizes, scalars))

    def _num_rows(self, rows: Rows) -> int:
        most = self._limits.max_tokens if rows == "tokens" else self._limits.max_outputs
        return -(-most // _TILE_ROWS) * _TILE_ROWS

    def _new(self, cols: int, dtype: Dtype, rows: Rows = "tokens") -> Value:
        size = self._num_rows(rows) * padded(cols) * ELEMENT_BYTES[dtype]
        return Value(self, self.draft.buffer(size), cols, dtype, rows)

    def _expect(self, x: Value, op: str) -> None:
        if x.dtype != self._dtype:
            raise Unsupported(f"{op} of {x.dtype} rows in a {self._dtype} program")

    def _stream(self, x: Value, residual: Value | None) -> tuple[tuple[Ref, Ref], Value]:
        """The residual and addend buffers of a norm, and the sum they make."""
        if residual is None:
            alone = x.dtype == "f32"
            return ((x.id, None) if alone else (None, x.id)), x
        if residual.dtype != "f32" or x.dtype != self._dtype or x.cols != residual.cols:
            raise Unsupported(f"adding {x.dtype} rows to a residual of {residual.dtype}")
        return (residual.id, x.id), residual

    def _weight(self, weight: LinearWeight) -> tuple[PackedWeight, tuple[Ref, Ref, Ref]]:
        key = weight.key if isinstance(weight, DeferredWeight) else id(weight)
        if key not in self._packed:
            how = pack_nothing if self._rehearsal else pack
            packed = how(weight, self._torch_dtype)
            self.weight_bytes += packed.num_bytes
            parts = (packed.data, packed.scale, packed.sums)
            refs = [None if part is None else self.draft.constant(part) for part in parts]
            self._kept.append(weight)  # so that its id stays its own
            self._packed[key] = packed, (refs[0], refs[1], refs[2])
            if isinstance(weight, torch.Tensor) and not self._rehearsal:
                weight.untyped_storage().resize_(0)
        return self._packed[key]

    def _vector(self, vector: torch.Tensor, offset: float = 0.0) -> Ref:
        """A float32 copy, padded with zeros to whole rows."""
        key = id(vector), offset
        if key not in self._vectors:
            values = vector.detach().float().flatten() + offset
            ref = self.draft.constant(
                as_bytes(F.pad(values, (0, padded(len(values)) + 32 - len(values))))
            )
            self._vectors[key] = vector, ref  # keeps `vector` alive, so its id stays its own
        return self._vectors[key][1]

    def _quantise(self, x: Value, weight: PackedWeight, row_bytes: int) -> tuple[Ref, Ref, Ref]:
        """Levels, scales and group sums of x; shared by the linears that read it."""
        key = x.id, weight.kind, weight.group
        if key not in self._quantised:
            rows = self._num_rows(x.rows)
            groups = row_bytes // weight.group if weight.group else 0
            levels, scale = (self.draft.buffer(rows * n) for n in (row_bytes, 4))
            sums = self.draft.buffer(rows * groups * 4) if groups else None
            sizes = x.cols, weight.group, int(weight.kind == "int8"), row_bytes
            self._call(Kind.QUANTISE, x, (x.id, levels, scale, sums), sizes)
            self._quantised[key] = levels, scale, sums
        levels, scale, sums = self._quantised[key]
        return levels, scale, sums

    def _layer_pages(self, layer: AttentionLayer) -> LayerPages:
        pages = self._pages.get(layer.index)
        if pages is None or not layer.causal or layer.group != "full":
            raise Unsupported("attention that is not causal, or outside the one group of pages")
        shape = pages.shape
        mine = layer.num_kv_heads, layer.head_dim, layer.value_dim
        if mine != (shape.num_kv_heads, shape.head_dim, shape.value_dim):
            raise Unsupported("attention heads that differ from the KV pool's")
        if max(layer.head_dim, layer.value_dim) > self._constants.max_head:
            raise Unsupported(f"heads of {layer.head_dim} columns")
        return pages

    def _rope(self, rope: Rope | None, head_dim: int) -> tuple[Ref, int]:
        if rope is None:
            return None, 0
        dim = rope.cos_sin.shape[1]
        if dim % 2 or dim > head_dim:
            raise Unsupported(f"a rotary table of {dim} columns for heads of {head_dim}")
        return self._vector(rope.cos_sin), dim

    def _head_norm(self, norm: HeadNorm | None, head_dim: int, heads: int) -> tuple[Ref, int]:
        """The weight, and whether it is over all heads at once."""
        if norm is None:
            return None, 0
        size = norm.weight.numel()
        if size not in (head_dim, heads * head_dim):
            raise Unsupported(f"a head norm of {size} weights for {heads} heads of {head_dim}")
        return self._vector(norm.weight, norm.offset), int(size != head_dim)


def view(memory: Bytes, rows: int, cols: int, dtype: Dtype) -> torch.Tensor:
    """The first rows of a buffer as a tensor, without copying. Shape: (rows, cols)."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    width = padded(cols)
    used = memory[: rows * width * kind.itemsize].view(np.int16 if kind.itemsize == 2 else np.int32)
    return torch.from_numpy(used).view(kind).view(rows, width)[:, :cols]
