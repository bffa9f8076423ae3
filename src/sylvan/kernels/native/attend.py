"""Paged attention of tensors: the kernels of step programs for models that cannot be recorded.

Shapes: T rows, N query heads, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.binding import Run
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import PARTS_MIB, NativeRecorder
from sylvan.kernels.native.sheet import RecorderLimits, padded
from sylvan.kernels.paged.cache import LayerPages

_MOST_KINDS = 512  # more would mean that a layer is new in each step: they are forgotten
_SLACK = 64  # numbers behind the rows that vector loads may touch


@dataclass(frozen=True, slots=True)
class _Kind:
    """A program for all layers that differ in their pages only, and where it finds what."""

    program: Program
    rows: int
    keys: int
    values: int
    out: int
    sinks: torch.Tensor | None  # kept, so that its address stays its own


class PagedAttention:
    """Stores keys and values of a step and attends, one native call a layer for all requests.

    Args:
        library: Loaded kernels.
        dtype: Of the model's rows and of the pages.
        pages: Of each layer, by its index.

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
        self._recorder()  # refuses the dtype

    def check(self, layer: AttentionLayer) -> None:
        """Whether such a layer can be computed.

        Raises:
            Unsupported: its heads are too large, or differ from those in the pages.
        """
        self._kind(layer)

    def run(
        self,
        layer: AttentionLayer,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        step: Run,
    ) -> torch.Tensor:
        """Attend; `step` says where the rows of each request lie and go.

        Args:
            layer: Constant over the life of a model; each kind of layer is recorded once.
            heads: Queries (T, N, H), keys (T, K, H) and values (T, K, V) of any strides.
            step: Its `tokens`, `seqs`, `slots`, `row_start`, `kv_len` and page table.

        Returns: (T, N, V) in the dtype of the queries, owned by the caller.
        """
        kind = self._kind(layer)
        count, width = len(heads[0]), layer.num_heads * layer.value_dim
        if count != step.tokens:
            raise RuntimeError(f"attention of {count} rows in a step of {step.tokens}")
        rows_TC = self._gather(heads)
        out_TC = torch.empty(count, padded(width), dtype=self._dtype)
        keys, values = self._places[layer.index]
        bind = kind.program.bind
        bind(kind.rows, rows_TC.data_ptr())
        bind(kind.keys, keys)
        bind(kind.values, values)
        bind(kind.out, out_TC.data_ptr())
        kind.program.run(step)
        out_TNV = out_TC[:, :width].unflatten(1, (layer.num_heads, layer.value_dim))
        return out_TNV.to(heads[0].dtype)

    def _gather(self, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rows of query heads, then key heads, then value heads, in memory that is used again."""
        count = len(heads[0])
        stride = padded(sum(x.shape[1] * x.shape[2] for x in heads))
        if len(self._rows) < count * stride + _SLACK:
            with torch.inference_mode(mode=False):  # written in that mode and outside of it
                self._rows = torch.zeros(count * stride + _SLACK, dtype=self._dtype)
        rows_TC = self._rows[: count * stride].view(count, stride)
        start = 0
        for x in heads:
            stop = start + x.shape[1] * x.shape[2]
            rows_TC[:, start:stop].unflatten(1, x.shape[1:]).copy_(x)
            start = stop
        return rows_TC

    def _kind(self, layer: AttentionLayer) -> _Kind:
        sinks = layer.sinks
        about_sinks = None if sinks is None else (sinks.data_ptr(), sinks.stride(), sinks.dtype)
        shape = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
        key = (*shape, layer.scale, layer.window, layer.softcap, layer.causal, about_sinks)
        if key not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            self._kinds[key] = self._record(layer)
        return self._kinds[key]

    def _record(self, layer: AttentionLayer) -> _Kind:
        recorder = self._recorder()
        width = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        cols = width + layer.num_kv_heads * layer.value_dim
        dtype = "bf16" if self._dtype == torch.bfloat16 else "f32"
        rows = recorder.input(cols, dtype)
        found = recorder.attention(rows, replace(layer, index=0), None, None, None)
        recorder.elsewhere(found)
        placed = place(recorder.draft)
        program = Program(self._library, placed)
        qkv, keys, values, out, parts, _ = program.ops[-1]["buf"][:6].tolist()
        program.bind(parts, self._parts.ctypes.data)
        return _Kind(program, qkv, keys, values, out, layer.sinks)

    def _recorder(self) -> NativeRecorder:
        # Rows and results lie where each call says: a program needs no memory of its own.
        limits = RecorderLimits(max_tokens=1, max_outputs=1)
        return NativeRecorder(self._dtype, limits, self._pages, self._library.constants)
