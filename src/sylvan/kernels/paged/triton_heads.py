"""From the fused projection to attention in one launch: head norms, rotary positions, KV store.

A program does a few heads of one row. Rotation combines a column with its partner, which is loaded
a second time (from the cache) instead of shuffled.

Shapes: T rows, N query heads, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import AttentionLayer, HeadNorm
from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.paged.pages import SCALED, Cache, Rotary
from sylvan.kernels.paged.triton_scaled import store_scaled

_ELEMENTS = 2048  # block of a program


@triton.jit
def _keep(ptr, at, x, mask, scale_ptr, head, SCALED: tl.constexpr, MAX: tl.constexpr):
    """Store; for fp8, with maximum MAX, as a saturated multiple of the head's scale."""
    if MAX > 0:
        x = x.to(tl.float32)
        if SCALED:
            x = x / tl.load(scale_ptr + head)
        x = tl.minimum(tl.maximum(x, -MAX), MAX)
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotated_heads(
    x_ptr,
    weight_ptr,
    angle_ptr,
    head,
    col,
    mask,
    eps,
    offset,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads of a row, normed ("head": separately, "all": together) and rotated; float32."""
    at = head[:, None] * WIDTH + col[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.zeros_like(head).to(tl.float32) + 1.0
    if NORM == "head":
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / WIDTH + eps)
        weight = tl.load(weight_ptr + col, mask=col < WIDTH, other=0.0).to(tl.float32)
        x = x * inverse[:, None] * (weight[None, :] + offset)
    elif NORM == "all":
        mean = tl.sum(tl.sum(x * x, 1), 0) / (WIDTH * HEADS)
        inverse = inverse / tl.sqrt_rn(mean + eps)
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = x * inverse[:, None] * (weight + offset)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        if INTERLEAVED:
            partner = col ^ 1
            pair = col // 2
            first = col % 2 == 0
        else:
            partner = tl.where(col < half, col + half, col - half)
            pair = col % half
            first = col < half
        is_rotary = col < ROTARY
        other_at = head[:, None] * WIDTH + partner[None, :]
        other_mask = mask & is_rotary[None, :]
        other = tl.load(x_ptr + other_at, mask=other_mask, other=0.0).to(tl.float32)
        if NORM == "head":
            weight = tl.load(weight_ptr + partner, mask=is_rotary, other=0.0).to(tl.float32)
            other = other * inverse[:, None] * (weight[None, :] + offset)
        elif NORM == "all":
            weight = tl.load(weight_ptr + other_at, mask=other_mask, other=0.0).to(tl.float32)
            other = other * inverse[:, None] * (weight + offset)
        cos = tl.load(angle_ptr + pair, mask=is_rotary, other=1.0)
        sin = tl.load(angle_ptr + half + pair, mask=is_rotary, other=0.0)
        x = x * cos[None, :] + other * tl.where(first, -sin, sin)[None, :]
    return x


@triton.jit
def _heads_kernel(
    x_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    position_ptr,
    slot_ptr,
    angle_ptr,
    q_weight_ptr,
    k_weight_ptr,
    x_stride,
    key_stride,
    key_head,
    value_stride,
    value_head,
    q_eps,
    q_offset,
    k_eps,
    k_offset,
    k_scale_ptr,
    v_scale_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (t, i): the i-th block of heads of row t; queries first, then keys, then values."""
    inputs_ready(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + Q_BLOCK - 1) // Q_BLOCK
    k_blocks: tl.constexpr = (KV_HEADS + K_BLOCK - 1) // K_BLOCK
    x_ptr += row * x_stride
    if ROTARY > 0:
        angle_ptr += tl.load(position_ptr + row).to(tl.int64) * ROTARY
    col = tl.arange(0, WIDTH_BLOCK)
    # Names differ by branch: Triton requires one shape per name on both sides of a condition.
    if block < q_blocks:
        q_head = block * Q_BLOCK + tl.arange(0, Q_BLOCK)
        q_mask = (q_head < HEADS)[:, None] & (col < WIDTH)[None, :]
        q = _rotated_heads(
            x_ptr,
            q_weight_ptr,
            angle_ptr,
            q_head,
            col,
            q_mask,
            q_eps,
            q_offset,
            HEADS,
            WIDTH,
            ROTARY,
            INTERLEAVED,
            Q_NORM,
        )
        q_at = (row * HEADS + q_head)[:, None] * WIDTH + col[None, :]
        tl.store(q_ptr + q_at, q.to(q_ptr.dtype.element_ty), mask=q_mask)
    elif block < q_blocks + k_blocks:
        k_head = (block - q_blocks) * K_BLOCK + tl.arange(0, K_BLOCK)
        k_mask = (k_head < KV_HEADS)[:, None] & (col < WIDTH)[None, :]
        k = _rotated_heads(
            x_ptr + HEADS * WIDTH,
            k_weight_ptr,
            angle_ptr,
            k_head,
            col,
            k_mask,
            k_eps,
            k_offset,
            KV_HEADS,
            WIDTH,
            ROTARY,
            INTERLEAVED,
            K_NORM,
        )
        slot = tl.load(slot_ptr + row).to(tl.int64)
        k_at = slot * key_stride + k_head[:, None] * key_head + col[None, :]
        # Round as the projection does, whatever the cache stores, to match the reference.
        own = tl.minimum(k_head, KV_HEADS - 1)[:, None]
        rounded = k.to(x_ptr.dtype.element_ty)
        _keep(key_ptr, k_at, rounded, k_mask, k_scale_ptr, own, SCALED, MAX)
    else:
        v_head = (block - q_blocks - k_blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
        value_col = tl.arange(0, VALUE_BLOCK)
        v_mask = (v_head < KV_HEADS)[:, None] & (value_col < VALUE)[None, :]
        start = (HEADS + KV_HEADS) * WIDTH
        v = tl.load(
            x_ptr + start + v_head[:, None] * VALUE + value_col[None, :], mask=v_mask, other=0.0
        )
        slot = tl.load(slot_ptr + row).to(tl.int64)
        v_at = slot * value_stride + v_head[:, None] * value_head + value_col[None, :]
        mine = tl.minimum(v_head, KV_HEADS - 1)[:, None]
        _keep(value_ptr, v_at, v, v_mask, v_scale_ptr, mine, SCALED, MAX)


@triton.jit
def _store_kernel(
    x_ptr,
    cache_ptr,
    slot_ptr,
    x_stride,
    x_head,
    cache_stride,
    cache_head,
    scale_ptr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    inputs_ready(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    col = tl.arange(0, WIDTH_BLOCK)[None, :]
    mask = (head < KV_HEADS) & (col < WIDTH)
    x = tl.load(x_ptr + row * x_stride + head * x_head + col, mask=mask, other=0.0)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    at = slot * cache_stride + head * cache_head + col
    _keep(cache_ptr, at, x, mask, scale_ptr, tl.minimum(head, KV_HEADS - 1), SCALED, MAX)


def store_heads(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    positions_T: torch.Tensor,
    rotary: Rotary,
    cache: Cache,
) -> torch.Tensor:
    """Norm and rotate queries and keys, store keys and values, and return the queries.

    Args:
        qkv: (T, N H + K H + K V), rows contiguous.
        layer: Numbers and sizes of heads.
        positions_T: Positions of the rows, int32 or int64.
        rotary: Norms and the table of angles.
        cache: Where to store keys and values.

    Returns: (T, N, H) in the dtype of `qkv`.
    """
    assert qkv.stride(1) == 1
    if cache.keys.dtype in SCALED:
        rows = _rows(qkv, layer)
        out = store_heads(qkv, layer, positions_T, rotary, rows)
        store_scaled(rows.keys[0], rows.values[0], cache)
        return out
    heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    out = qkv.new_empty(len(qkv), heads, width)
    width_block, value_block = power_of_two(width), power_of_two(layer.value_dim)
    norms = [_kind(norm, width) for norm in (rotary.q_norm, rotary.k_norm)]
    blocks = [
        power_of_two(count) if kind == "all" else _block(count, columns)
        for count, columns, kind in (
            (heads, width_block, norms[0]),
            (kv_heads, width_block, norms[1]),
            (kv_heads, value_block, "none"),
        )
    ]
    counts = zip((heads, kv_heads, kv_heads), blocks, strict=True)
    angles = None if rotary.rope is None else rotary.rope.cos_sin
    weights = [n and n.weight for n in (rotary.q_norm, rotary.k_norm)]
    numbers = [
        x for n in (rotary.q_norm, rotary.k_norm) for x in ((n.eps, n.offset) if n else (0.0, 0.0))
    ]
    launch_early(
        _heads_kernel,
        (len(qkv), sum(ceil_div(count, block) for count, block in counts)),
        qkv,
        out,
        cache.keys,
        cache.values,
        positions_T,
        cache.slots_T,
        qkv if angles is None else angles,
        *(qkv if weight is None else weight for weight in weights),
        qkv.stride(0),
        *cache.keys.stride()[1:3],
        *cache.values.stride()[1:3],
        *numbers,
        *_scales(cache, qkv),
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        VALUE=layer.value_dim,
        WIDTH_BLOCK=width_block,
        VALUE_BLOCK=value_block,
        Q_BLOCK=blocks[0],
        K_BLOCK=blocks[1],
        V_BLOCK=blocks[2],
        ROTARY=0 if angles is None else angles.shape[1],
        INTERLEAVED=rotary.rope is not None and rotary.rope.interleaved,
        Q_NORM=norms[0],
        K_NORM=norms[1],
        SCALED=cache.scales is not None,
        MAX=_max_of(cache.keys.dtype),
        num_warps=8 if "all" in norms else 4,
    )
    return out


def store_kv(k_TKH: torch.Tensor, v_TKH: torch.Tensor, cache: Cache) -> None:
    """Store keys and values; values that are columns of the keys are there with them."""
    if cache.keys.dtype in SCALED:
        store_scaled(k_TKH, v_TKH, cache)
        return
    scales = _scales(cache, None)
    _store(k_TKH, cache.keys, cache.slots_T, scales[0])
    if cache.values.stride(2) == cache.values.shape[3]:
        _store(v_TKH, cache.values, cache.slots_T, scales[1])


def _rows(qkv: torch.Tensor, layer: AttentionLayer) -> Cache:
    """A cache of the rows themselves."""
    size = (1, len(qkv), layer.num_kv_heads)
    keys, values = (qkv.new_empty(*size, width) for width in (layer.head_dim, layer.value_dim))
    slots_T = torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
    return Cache(keys=keys, values=values, slots_T=slots_T)


def _scales(
    cache: Cache, nothing: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scales of key heads and of value heads."""
    return (nothing, nothing) if cache.scales is None else (cache.scales.keys, cache.scales.values)


def _store(
    x_TKH: torch.Tensor, side: torch.Tensor, slots_T: torch.Tensor, scale_K: torch.Tensor | None
) -> None:
    if x_TKH.stride(2) != 1:
        x_TKH = x_TKH.contiguous()
    heads, width = x_TKH.shape[1:]
    width_block = power_of_two(width)
    block = _block(heads, width_block)
    launch_early(
        _store_kernel,
        (len(x_TKH), ceil_div(heads, block)),
        x_TKH,
        side,
        slots_T,
        *x_TKH.stride()[:2],
        *side.stride()[1:3],
        slots_T if scale_K is None else scale_K,
        KV_HEADS=heads,
        WIDTH=width,
        HEAD_BLOCK=block,
        WIDTH_BLOCK=width_block,
        SCALED=scale_K is not None,
        MAX=_max_of(side.dtype),
    )


def _max_of(dtype: torch.dtype) -> float:
    """Largest number of an 8-bit dtype, to saturate at; 0 for wider dtypes."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def _kind(norm: HeadNorm | None, width: int) -> str:
    if norm is None:
        return "none"
    return "head" if norm.weight.numel() == width else "all"


def _block(heads: int, width: int) -> int:
    return max(1, min(power_of_two(heads), _ELEMENTS // width))
