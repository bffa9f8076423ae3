"""The definition of correct, in PyTorch.

Shapes: T rows, N query heads, K key/value heads, H head dim, S tokens of one request.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import AttentionLayer, BlockPattern, HeadNorm, Rope
from sylvan.kernels.collective.reference import mean_of_squares
from sylvan.kernels.matmul.reference import quantise_rows


def head_norm(x_TNH: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
    """RMSNorm over H of every head, or over all heads at once if the weight has all columns.

    float32 in, float32 out.
    """
    if norm is None:
        return x_TNH
    if norm.weight.numel() != x_TNH.shape[-1] or (norm.over and x_TNH.dim() > 2):
        whole = head_norm(x_TNH.flatten(-2), norm)
        return whole.unflatten(-1, x_TNH.shape[-2:])
    inverse = torch.rsqrt(mean_of_squares(x_TNH, norm.over) + norm.eps)
    return x_TNH * inverse * (norm.weight.float() + norm.offset)


def rotate(x_TNH: torch.Tensor, positions_T: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Apply rotary embedding to the first rotary_dim columns of every head; float32 in and out."""
    if rope is None:
        return x_TNH
    dim = rope.cos_sin.shape[1]
    cos, sin = rope.cos_sin[positions_T.long(), None].chunk(2, -1)
    rotary, passing = x_TNH[..., :dim], x_TNH[..., dim:]
    if rope.interleaved:
        a, b = rotary[..., ::2], rotary[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = rotary.chunk(2, -1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((rotated, passing), -1)


def split_heads(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    positions_T: torch.Tensor,
    rope: Rope | None,
    norms: tuple[HeadNorm | None, HeadNorm | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values in the dtype of `qkv`, normed and rotated."""
    sizes = [layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim]
    q, k, v = qkv.split([*sizes, layer.num_kv_heads * layer.value_dim], -1)
    q, k = (x.float().unflatten(-1, (-1, layer.head_dim)) for x in (q, k))
    q = rotate(head_norm(q, norms[0]), positions_T, rope).to(qkv.dtype)
    k = rotate(head_norm(k, norms[1]), positions_T, rope).to(qkv.dtype)
    return q, k, v.unflatten(-1, (-1, layer.value_dim))


def through_int4(x: torch.Tensor) -> torch.Tensor:
    """Round trip of heads through int4 pages: Hadamard rotation, 16 levels times a scale, back."""
    level, scale = _sixteen(x)
    return hadamard((level - 7.5) * scale)


def _sixteen(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels 0 .. 15 of rotated heads, float32, and scales (..., 1)."""
    rotated = hadamard(x.float())
    top = rotated.abs().amax(-1, keepdim=True)
    return (rotated * torch.where(top > 0, 7.5 / top, 0.0) + 7.5).round(), top / 7.5


def int4_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads (..., H) as rotated pairs of levels (..., H / 2), and their scales (...).

    A byte has columns d and d + H / 2.
    """
    level, scale = _sixteen(x)
    low, high = level.to(torch.uint8).chunk(2, -1)
    return low | high << 4, scale[..., 0]


def int8_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads (..., H) as int8, and their scales (...)."""
    levels, scale = quantise_rows(x)
    return levels.to(torch.int8), scale[..., 0]


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Heads times the normal Hadamard matrix, its own inverse. Shape: (..., 2^n), float32."""
    cols, half = x.shape[-1], 1
    while half < cols:
        pairs = x.unflatten(-1, (-1, 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x * (1.0 / torch.tensor(float(cols)).sqrt())


def through_fp8(
    x_TKH: torch.Tensor, kind: torch.dtype, scale_K: torch.Tensor | None = None
) -> torch.Tensor:
    """Round trip through FP8 pages, float32: with given scales, or one per head and token."""
    x, most = x_TKH.float(), torch.finfo(kind).max
    top = x.abs().amax(-1, keepdim=True)
    scale = torch.where(top > 0, top / most, 1.0) if scale_K is None else scale_K[:, None]
    return (x / scale).clamp(-most, most).to(kind).float() * scale


def through_int8(x_TKH: torch.Tensor) -> torch.Tensor:
    """Round trip of keys or values through int8 pages, float32: one scale per head and token."""
    levels, scale = quantise_rows(x_TKH)
    return levels * scale


def attend(
    q_TNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    layer: AttentionLayer,
    ends_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last T of S tokens over all S, in float32. Shape: (T, N H).

    With `ends` a row also sees later tokens, up to its end. All tokens belong to one chunk.
    """
    group = layer.num_heads // layer.num_kv_heads
    q = q_TNH.float().transpose(0, 1)
    k, v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k_SKH, v_SKH))
    score_NTS = q @ k.transpose(1, 2) * layer.scale
    if layer.softcap:
        score_NTS = layer.softcap * torch.tanh(score_NTS / layer.softcap)
    rows, total = len(q_TNH), len(k_SKH)
    own = torch.arange(total - rows, total, device=q.device)[:, None]
    key = torch.arange(total, device=q.device)
    if layer.slopes is not None:
        score_NTS = score_NTS + layer.slopes[:, None, None] * (key - own)
    if layer.biases is not None:
        biases_ND = layer.biases.view(layer.num_heads, -1).float()
        score_NTS = score_NTS + biases_ND[:, (own - key).clamp(0, biases_ND.shape[1] - 1)]
    last = own if ends_T is None else torch.maximum(own, ends_T[:, None] - 1)
    hidden = key > last if layer.causal else torch.zeros_like(key > own)
    if layer.window:
        hidden = hidden | (key <= own - layer.window)
    if layer.blocks is not None:
        hidden = hidden | _hidden_blocks(layer.blocks, own, key, layer.num_heads)
    score_NTS = score_NTS.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sink = layer.sinks.float()[:, None, None].expand(-1, rows, 1)
        weight = torch.softmax(torch.cat((score_NTS, sink), -1), -1)[..., :-1]
    else:
        weight = torch.softmax(score_NTS, -1)
    return (weight @ v).transpose(0, 1).flatten(1).to(q_TNH.dtype)


def _hidden_blocks(
    pattern: BlockPattern, own_T1: torch.Tensor, key_S: torch.Tensor, heads: int
) -> torch.Tensor:
    """Tokens in blocks that heads of rows do not see. Shape: bool (N, T, S)."""
    shift_N11 = torch.tensor(pattern.shifts(heads), device=key_S.device)[:, None, None]
    block_S = key_S // pattern.size
    passed_N1S = (block_S + shift_N11) % pattern.stride != 0
    return (own_T1 // pattern.size - block_S >= pattern.near) & passed_N1S
