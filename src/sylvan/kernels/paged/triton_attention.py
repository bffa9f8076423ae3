"""Paged attention on GPUs: kernel arguments and launches.

Shapes: T rows, R requests, S rows of the page table, N query heads, K key/value heads, H head dim,
V value dim. No call waits for the GPU. Lengths and page numbers are read from device memory, so a
captured graph can be replayed with others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.gpu.launch import arch_of, launch, launch_early
from sylvan.kernels.gpu.tiles import Tile, ceil_div, power_of_two, tile
from sylvan.kernels.paged.pages import LayerKV, token_scales
from sylvan.kernels.paged.triton_decode import decode_kernel, merge_kernel
from sylvan.kernels.paged.triton_extend import extend_kernel

_PROGRAMS = 2048  # enough to fill any GPU several times over
_WIDE_PROGRAMS = 512  # latent attention: each takes a whole multiprocessor
_MAX_SPLITS = 64
_FEW = 8  # for the interpreter, which runs programs one by one
_MIN_SPLIT = 128  # tokens: shorter ones cost large batches more than they gain small ones
_MIN_COLUMNS = 16  # smallest block of a matrix unit


@dataclass(frozen=True, slots=True)
class _Shape:
    """Block sizes of a head's columns."""

    main: int
    tail: int
    value: int
    shared: bool

    @staticmethod
    def of(pages: LayerKV) -> _Shape:
        width, value = pages.widths
        main = max(_MIN_COLUMNS, 1 << (width.bit_length() - 1))
        tail = 0 if main >= width else max(_MIN_COLUMNS, power_of_two(width - main))
        shared = pages.shared and value <= main <= width
        block = main if shared else max(_MIN_COLUMNS, power_of_two(value))
        return _Shape(main, tail, block, shared)

    def min_split(self, group: int) -> int:
        """Minimum tokens per split: for many latent heads a partial result is as large as KV."""
        return max(_MIN_SPLIT, power_of_two(4 * group)) if self.shared else _MIN_SPLIT

    def max_programs(self) -> int:
        """Most programs of a decode step; a program without a split costs only its launch."""
        return _WIDE_PROGRAMS if self.shared else _PROGRAMS

    def max_splits(self) -> int:
        """Most KV splits of a request; sizes the memory for partial results."""
        return _MAX_SPLITS // 2 if self.shared else _MAX_SPLITS


def decode(
    q_RNH: torch.Tensor, pages: LayerKV, layer: AttentionLayer, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode attention: one query per request, its last token. Shape: (R, N, H) -> (R, N, V).

    A row without KV yields zeros.
    """
    q_RNH = _rows(q_RNH)
    requests, heads, value = len(q_RNH), layer.num_heads, pages.widths[1]
    group = heads // layer.num_kv_heads
    shape = _Shape.of(pages)
    sizes = _sizes(q_RNH, pages, layer, "decode")
    min_split = sizes.split or shape.min_split(group)
    mine = sizes.rows if shape.shared else min(sizes.rows, _block(group))
    programs = layer.num_kv_heads * ceil_div(group, mine)
    splits = min(shape.max_splits(), max(8, power_of_two(ceil_div(128, programs))))
    budget = _FEW if arch_of(q_RNH) == "interpreter" else shape.max_programs()
    lanes = max(1, min(splits, budget // max(1, requests * programs)))
    if out is None:
        out = q_RNH.new_empty(requests, heads, value)
    part = q_RNH.new_empty(requests, heads, splits, value, dtype=torch.float32)
    peak = q_RNH.new_empty(requests, heads, splits, dtype=torch.float32)
    launch_early(
        decode_kernel,
        (programs, lanes, requests),
        q_RNH,
        pages.keys,
        pages.values,
        pages.table_SP,
        pages.rows_R,
        pages.lens_R,
        part if layer.slopes is None else layer.slopes,
        *_scales(pages, part),
        part,
        peak,
        q_RNH.stride(0),
        *_strides(pages),
        layer.scale,
        layer.softcap or 1.0,
        lanes,
        **_constants(layer, pages, shape),
        SPLITS=splits,
        MIN_SPLIT=min_split,
        HEADS=mine,
        BLOCK=sizes.cols,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    launch_early(
        merge_kernel,
        (requests, heads),
        part,
        peak,
        pages.lens_R,
        part if layer.sinks is None else layer.sinks,
        _scales(pages, part)[1],
        out,
        NUM_HEADS=heads,
        GROUP=group,
        SCALED=pages.scaled,
        VALUE=value,
        VALUE_BLOCK=power_of_two(value),
        WINDOW=layer.window or 0,
        SEGMENT=layer.chunk or 0,
        SPLITS=splits,
        MIN_SPLIT=min_split,
        SINKS=layer.sinks is not None,
        BLOCK=sizes.cols,
        CHUNK=min(8, splits),
        num_warps=4,
    )
    return out


def extend(
    q_TNH: torch.Tensor,
    pages: LayerKV,
    q_starts_R1: torch.Tensor,
    layer: AttentionLayer,
    out: torch.Tensor | None = None,
    ends_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each request's last tokens over all of its KV. Shape: (T, N, H) -> (T, N, V).

    Args:
        q_TNH: Rows q_starts_R1[r] to q_starts_R1[r + 1] belong to request r.
        pages: KV of the requests; that of these tokens has been stored.
        q_starts_R1: int32 (R + 1,). Rows after the last request stay unchanged in `out`.
        layer: The layer.
        out: Output; zeros are allocated if None.
        ends_T: int32; a causal row also sees later tokens of its request, up to its end.
    """
    q_TNH = _rows(q_TNH)
    shape, sizes = _Shape.of(pages), _sizes(q_TNH, pages, layer, "extend")
    requests, heads, value = len(pages.lens_R), layer.num_heads, pages.widths[1]
    group = heads // layer.num_kv_heads
    mine = min(group, sizes.rows)
    tokens = sizes.rows // mine
    if out is None:
        out = q_TNH.new_zeros(len(q_TNH), heads, value)
    if not requests:
        return out
    # `softmax_update_block`, which copies by tensor descriptors, does not support ALiBi.
    descriptors = (
        None if layer.slopes is not None else _descriptors(q_TNH, pages, shape, sizes.cols)
    )
    launch(
        extend_kernel,
        (len(q_TNH) // tokens + requests, layer.num_kv_heads * ceil_div(group, mine)),
        q_TNH,
        pages.keys,
        pages.values,
        *(descriptors or (q_TNH, q_TNH)),
        pages.table_SP,
        pages.rows_R,
        pages.lens_R,
        q_starts_R1,
        q_starts_R1 if layer.sinks is None else layer.sinks,
        q_starts_R1 if ends_T is None else ends_T,
        q_starts_R1 if layer.slopes is None else layer.slopes,
        *_scales(pages, q_starts_R1),
        out,
        requests,
        q_TNH.stride(0),
        *_strides(pages),
        layer.scale,
        layer.softcap or 1.0,
        **_constants(layer, pages, shape),
        CAUSAL=layer.causal,
        BLOCKS=descriptors is not None,
        SINKS=layer.sinks is not None,
        ENDS=ends_T is not None,
        HEADS=mine,
        TOKENS=tokens,
        ROWS=sizes.rows,
        BLOCK=sizes.cols,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return out


def _block(columns: int) -> int:
    return max(_MIN_COLUMNS, power_of_two(columns))


def _sizes(q: torch.Tensor, pages: LayerKV, layer: AttentionLayer, op: str) -> Tile:
    arch = arch_of(q)
    if _Shape.of(pages).shared:
        group = layer.num_heads // layer.num_kv_heads
        kind = "chosen" if pages.keys.shape[1] == 1 and op == "decode" else "latent"
        return tile(f"{kind} {op}", group, pages.keys.element_size(), arch)
    # Elements are converted to the type of q. Scales of tokens take registers, as wide heads do.
    wide = 2 if pages.scaled == "token" else 1
    return tile(op, pages.widths[0] * wide, q.element_size(), arch)


def _descriptors(
    q: torch.Tensor, pages: LayerKV, shape: _Shape, block: int
) -> tuple[TensorDescriptor, ...] | None:
    """Tensor descriptors for blocks of keys and values; None if the chip or layout has none.

    Pages must consist of whole blocks; heads must be as wide as blocks and have q's dtype.
    """
    sides = pages.keys, pages.values
    if arch_of(q) not in ("sm90", "sm100", "interpreter") or shape.shared or shape.tail:
        return None
    if pages.keys.shape[1] % block or any(side.dtype != q.dtype for side in sides):
        return None
    if q.element_size() > 2 or (shape.main, shape.value) != tuple(s.shape[3] for s in sides):
        return None
    if any(side.stride(2) != side.shape[3] or side.data_ptr() % 16 for side in sides):
        return None
    found = []
    for side in sides:
        count, page, heads, width = side.shape
        whole, strides = [count * page, heads * width], [side.stride(1), 1]
        found.append(TensorDescriptor(side, whole, strides, [block, width]))
    return tuple(found)


def _rows(q: torch.Tensor) -> torch.Tensor:
    """Queries with the heads of a row side by side."""
    dense = q.stride(2) == 1 and q.stride(1) == q.shape[2]
    return q if dense else q.contiguous()


def _scales(pages: LayerKV, nothing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of keys and of values, by head, or by token and head."""
    if pages.scaled == "token":
        return token_scales(pages.keys), token_scales(pages.values)
    return (nothing, nothing) if pages.scales is None else (pages.scales.keys, pages.scales.values)


def _strides(pages: LayerKV) -> tuple[int, ...]:
    keys, values = pages.keys, pages.values
    strides = (keys.stride(1), keys.stride(2), values.stride(1), values.stride(2))
    steps = (0, 0)  # from a token's scales to the next one's
    if pages.scaled == "token":
        steps = (keys.stride(1) // 4, values.stride(1) // 4)
    return (*strides, *steps, pages.table_SP.stride(0))


def _constants(layer: AttentionLayer, pages: LayerKV, shape: _Shape) -> dict[str, object]:
    return {
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "KV_HEADS": layer.num_kv_heads,
        "WIDTH": pages.widths[0],
        "VALUE": pages.widths[1],
        "MAIN": shape.main,
        "TAIL": shape.tail,
        "VALUE_BLOCK": shape.value,
        "PAGE": pages.keys.shape[1],
        "WINDOW": layer.window or 0,
        "SEGMENT": layer.chunk or 0,
        "SLOPED": layer.slopes is not None,
        "SHARED": shape.shared,
        "CAPPED": layer.softcap is not None,
        "SCALED": pages.scaled,
        "PAIRS": pages.pairs,
    }
