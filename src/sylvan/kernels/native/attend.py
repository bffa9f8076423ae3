"""Runs the paged-attention kernels of step programs on tensors, for models that are not traced.

Shapes: T rows, N query heads, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope, Unsupported
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.builder import padded
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.opset import Attention, RopeStore
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import PARTS_MIB, NativeTracer
from sylvan.kernels.paged.cache import LayerPages

_MAX_KINDS = 512  # beyond this, layers seem to change in each step, so the cache is dropped
_SLACK = 64  # numbers after the rows that vector loads may read


@dataclass(frozen=True, slots=True)
class _Kind:
    """A program for all layers that differ only in their pages, and the places of its operands."""

    program: Program
    rows: int
    keys: int
    values: int
    out: int
    table: int  # of rotation, if any columns rotate
    work: tuple[int, ...]  # `HeadTransform.key`
    shape: tuple[int, ...]  # shape of a row of results: heads and columns, or columns with padding
    kept: tuple[object, ...]  # objects that keys identify by address


Norms = tuple[HeadNorm | None, HeadNorm | None]
"""Norms of query heads and of key heads."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadTransform:
    """Transformations of queries and keys before attention: norms, then rotation.

    `table_TR`: rotary table at the `positions` of the step; see `Rope`.
    """

    table_TR: torch.Tensor | None = None
    interleaved: bool = False
    norms: Norms = (None, None)

    @property
    def rope_dim(self) -> int:
        """Number of rotated columns of a head."""
        return 0 if self.table_TR is None else self.table_TR.shape[1]

    @property
    def key(self) -> tuple[int, ...]:
        """Key of the program: everything that affects how it is compiled."""
        return self.rope_dim, self.interleaved, *map(id, self.norms)


_NO_WORK = HeadTransform()


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for rows of heads of these shapes: a view per part, and a joined one if possible."""

    shape: tuple[torch.Size, ...]
    parts: list[torch.Tensor]
    joined: torch.Tensor | None
    address: int


class NativePagedAttention:
    """Stores keys and values of a step and attends, by one native call per layer.

    Args:
        library: Loaded kernels.
        dtype: Type of the model's rows and of the pages.
        pages: Pages of each layer, by its index.

    Raises:
        Unsupported: no kernels for that dtype.
    """

    def __init__(
        self, library: Library, dtype: torch.dtype, pages: Mapping[int, LayerPages]
    ) -> None:
        self._library, self._dtype, self._pages = library, dtype, pages
        self._places = {
            index: (page.keys.ctypes.data, page.values.ctypes.data) for index, page in pages.items()
        }
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._parts = allocate(PARTS_MIB << 20)
        self._rows = torch.empty(0, dtype=dtype)
        self._scratch = _Scratch((), [], None, 0)
        self._recent: dict[int, tuple[AttentionLayer, _Kind]] = {}
        self._works: dict[tuple[int, ...], tuple[Rope | None, HeadTransform]] = {}
        self._tracer()  # raises for an unsupported dtype

    def check(self, layer: AttentionLayer) -> None:
        """Check that a layer can be computed.

        Raises:
            Unsupported: its heads are too large, or differ from those in the pages.
        """
        self._kind(layer)

    def clear_cache(self) -> None:
        """Drop compiled programs, because norms and sinks have changed."""
        self._kinds.clear()
        self._recent.clear()

    def run(
        self,
        layer: AttentionLayer,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        step: StepRun,
        work: HeadTransform = _NO_WORK,
    ) -> torch.Tensor:
        """Attend; `step` says where the rows of each request lie and go.

        Args:
            layer: Constant over the life of a model; each kind of layer is compiled once.
            heads: Queries (T, N, H), keys (T, K, H) and values (T, K, V) of any strides.
            step: Its `tokens`, `seqs`, `slots`, `row_start`, `kv_len` and page tables.
            work: Norms and rotary embedding applied to the heads first.

        Returns: (T, N, V) in the dtype of the queries, owned by the caller.
        """
        kind, count = self._kind(layer, work), len(heads[0])
        if count != step.tokens:
            raise RuntimeError(f"attention of {count} rows in a step of {step.tokens}")
        rows = self._gather(heads)
        out = torch.empty((count, *kind.shape), dtype=self._dtype)
        keys, values = self._places[layer.index]
        places = (
            (kind.rows, rows),
            (kind.keys, keys),
            (kind.values, values),
            (kind.out, out.data_ptr()),
        )
        if work.table_TR is not None:
            places += ((kind.table, work.table_TR.data_ptr()),)
        kind.program.run_at(step, *places)
        if len(kind.shape) == 1:  # with columns after those of the heads
            width = layer.num_heads * layer.value_dim
            out = out[:, :width].unflatten(1, (layer.num_heads, layer.value_dim))
        return out if out.dtype == heads[0].dtype else out.to(heads[0].dtype)

    def run_fused(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        rope: Rope | None,
        norms: Norms,
        step: StepRun,
    ) -> torch.Tensor:
        """Apply head norms and rotary embedding to a joined projection, then attend.

        Args:
            layer: See `run`.
            qkv: Rows of query heads, then key heads, then value heads: (T, (N + K) H + K V).
            rope: Rotary table of the model, or None.
            norms: Norms of query and of key heads.
            step: See `run`; `positions` must be set, too.

        Returns: (T, N, V) in the dtype of `qkv`, owned by the caller.
        """
        sizes = [layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim]
        q, k, v = qkv.split([*sizes, layer.num_kv_heads * layer.value_dim], -1)
        q, k = (x.unflatten(-1, (-1, layer.head_dim)) for x in (q, k))
        heads = q, k, v.unflatten(-1, (-1, layer.value_dim))
        return self.run(layer, heads, step, self._work(rope, norms))

    def _work(self, rope: Rope | None, norms: Norms) -> HeadTransform:
        key = (id(rope), *map(id, norms))
        if key not in self._works:
            table = None if rope is None else _with_slack(rope.cos_sin)
            work = HeadTransform(table, rope is not None and rope.interleaved, norms)
            for known, other in self._works.values():
                if known is rope:
                    work = replace(work, table_TR=other.table_TR)
            self._works[key] = rope, work
        return self._works[key][1]

    def _gather(self, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> int:
        """Copy query, key and value heads into one buffer; return its address."""
        query, key, value = heads
        shape = query.shape, key.shape, value.shape
        if shape != self._scratch.shape:
            self._scratch = self._made_scratch(shape)
        scratch = self._scratch
        if scratch.joined is not None and query.dtype == key.dtype == value.dtype == self._dtype:
            torch.cat(heads, 1, out=scratch.joined)
        else:
            for part, x in zip(scratch.parts, heads, strict=True):
                part.copy_(x)
        return scratch.address

    def _made_scratch(self, shape: tuple[torch.Size, ...]) -> _Scratch:
        """Return views of the reused memory for rows of these heads."""
        count, cols = shape[0][0], [heads * width for _, heads, width in shape]
        stride = padded(sum(cols))
        with torch.inference_mode(mode=False):  # written in that mode and outside of it
            if len(self._rows) < count * stride + _SLACK:
                self._rows = torch.zeros(count * stride + _SLACK, dtype=self._dtype)
            rows_TC = self._rows[: count * stride].view(count, stride)[:, : sum(cols)]
            parts = rows_TC.split(cols, 1)
            parts = [part.unflatten(1, x[1:]) for part, x in zip(parts, shape, strict=True)]
            same = len({x[2] for x in shape}) == 1
            joined = rows_TC.unflatten(1, (-1, shape[0][2])) if same else None
        return _Scratch(shape, parts, joined, self._rows.data_ptr())

    def _kind(self, layer: AttentionLayer, work: HeadTransform = _NO_WORK) -> _Kind:
        recent = self._recent.get(layer.index)
        if recent is None or recent[0] is not layer or recent[1].work != work.key:
            recent = self._recent[layer.index] = layer, self._kind_of(layer, work)
        return recent[1]

    def _kind_of(self, layer: AttentionLayer, work: HeadTransform) -> _Kind:
        sinks = layer.sinks
        about_sinks = None if sinks is None else (sinks.data_ptr(), sinks.stride(), sinks.dtype)
        shape = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
        how = layer.scale, layer.window, layer.softcap, layer.causal
        pages = self._pages.get(layer.index)
        if pages is None:
            raise Unsupported(f"attention of layer {layer.index}, which has no pages")
        scales = layer.kv_scales and (id(layer.kv_scales.keys), id(layer.kv_scales.values))
        key = (*shape, *work.key, *how, about_sinks, scales, pages.group, *pages.steps)
        if key not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[key] = self._compiled(layer, work)
        return self._kinds[key]

    def _compiled(self, layer: AttentionLayer, work: HeadTransform) -> _Kind:
        tracer = self._tracer()
        width = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        cols = width + layer.num_kv_heads * layer.value_dim
        rows = tracer.input(cols, tracer.dtype)
        rope = (
            Rope(torch.zeros(1, work.rope_dim, dtype=torch.float32), work.interleaved)
            if work.rope_dim
            else None
        )
        found = tracer.attention(rows, layer, rope, work.norms, None)
        tracer.external(found)
        layout = compile_graph(tracer.graph)
        program = Program(self._library, layout)
        store, attention = tracer.graph.ops[0], tracer.graph.ops[-1]
        assert isinstance(store, RopeStore)
        assert isinstance(attention, Attention)
        program.bind(layout.entry(attention.parts), self._parts.ctypes.data)
        width = layer.num_heads * layer.value_dim
        shape = (layer.num_heads, layer.value_dim) if padded(width) == width else (padded(width),)
        keys, values = layout.entry(attention.kv.keys), layout.entry(attention.kv.values)
        rows_at, out_at = program.number(rows), program.number(found)
        table = -1 if store.cos_sin is None else layout.entry(store.cos_sin)
        kept = layer.sinks, layer.kv_scales, work
        return _Kind(program, rows_at, keys, values, out_at, table, work.key, shape, kept)

    def _tracer(self) -> NativeTracer:
        # Each call passes its rows and results: the program needs no memory.
        limits = ProgramLimits(max_tokens=1, max_outputs=1)
        return NativeTracer(self._dtype, limits, self._pages, self._library.constants)


def _with_slack(table: torch.Tensor) -> torch.Tensor:
    """Return the table, or a float32 copy of it, with slack for vector loads."""
    last = table.storage_offset() + table.numel() + _SLACK
    plain = table.dtype == torch.float32 and table.is_contiguous()
    if plain and last * table.itemsize <= table.untyped_storage().nbytes():
        return table  # steps may change its spare rows
    memory = torch.zeros(table.numel() + _SLACK, dtype=torch.float32)
    return memory[: table.numel()].view(table.shape).copy_(table)
