"""Rounds matrices to ggml's K-quants: blocks of 256 numbers with quantised scales.

Layouts and the search for scales follow `ggml-quants.c`: it tries several scales per group, and
takes the one with the smallest squared error, weighted towards large numbers.

Shapes: N rows, K inputs, B blocks of 256, S groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

BLOCK = 256
_MIN = 1e-30


@dataclass(frozen=True, slots=True)
class _Search:
    """Inverse scales to try: (levels + first + i * width) / range, for each i."""

    levels: int
    first: float
    width: float
    count: int


_FOUR = _Search(15, -1.0, 0.1, 20)
_FIVE = _Search(31, -0.5, 0.1, 15)
_TWO = _Search(3, -0.5, 0.1, 15)


def _with_shift(
    x: torch.Tensor, weight: torch.Tensor, how: _Search
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of groups (..., size), both at least 0: x is about scale * level - shift."""
    low = x.amin(-1, keepdim=True).clamp_max(0.0)
    span = (x.amax(-1, keepdim=True) - low).clamp_min(_MIN)
    scale, shift = span / how.levels, low
    best = _loss(x, weight, scale, shift, how.levels)
    total, moment = weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True)
    for index in range(how.count + 1):
        step = (how.levels + how.first + how.width * index) / span
        level = (step * (x - low)).round().clamp(0, how.levels)
        first = (weight * level).sum(-1, keepdim=True)
        second = (weight * level * level).sum(-1, keepdim=True)
        mixed = (weight * level * x).sum(-1, keepdim=True)
        below = total * second - first * first
        sized = below > 0
        below = torch.where(sized, below, 1.0)
        a = (total * mixed - moment * first) / below
        b = (second * moment - first * mixed) / below
        over = b > 0  # shifts are not negative
        a = torch.where(over, mixed / second.clamp_min(_MIN), a)
        b = torch.where(over, 0.0, b)
        loss = _loss(x, weight, a, b, how.levels)
        better = sized & (loss < best) & (a > 0)
        scale, shift = torch.where(better, a, scale), torch.where(better, b, shift)
        best = torch.where(better, loss, best)
    return scale[..., 0], -shift[..., 0]


def _loss(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, levels: int
) -> torch.Tensor:
    level = ((x - shift) / scale.clamp_min(_MIN)).round().clamp(0, levels)
    return (weight * (scale * level + shift - x).square()).sum(-1, keepdim=True)


def _around_zero(x: torch.Tensor, half: int) -> torch.Tensor:
    """Scale of groups (..., size), of either sign: x is about scale * level, level >= -half."""
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    weight = x * x
    best_scale = extreme / -half
    best = torch.full_like(extreme, -1.0)
    for index in range(-9, 10):
        step = -(half + 0.1 * index) / torch.where(extreme == 0, 1.0, extreme)
        level = (step * x).round().clamp(-half, half - 1)
        mixed = (weight * x * level).sum(-1, keepdim=True)
        second = (weight * level * level).sum(-1, keepdim=True)
        gain = mixed * mixed / second.clamp_min(_MIN)
        better = gain > best
        best_scale = torch.where(better, mixed / second.clamp_min(_MIN), best_scale)
        best = torch.where(better, gain, best)
    return torch.where(extreme == 0, 0.0, best_scale)[..., 0]


def _half(x: torch.Tensor) -> torch.Tensor:
    """Round (..., 1) numbers to float16; return them as float16 and as float32."""
    return x.clamp(-65504.0, 65504.0).half()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _six_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise non-negative scales (N, B, S) to six bits times a float16 step (N, B, 1)."""
    step = _half(x.amax(-1, keepdim=True) / 63)
    level = (x / step.float().clamp_min(_MIN)).round().clamp(0, 63)
    return torch.where(step > 0, level, 0.0).to(torch.uint8), step


def _packed_scales(scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Pack eight pairs of 6-bit numbers into twelve bytes: twice (N, B, 8) -> (N, B, 12)."""
    low, high = slice(0, 4), slice(4, 8)
    return torch.cat(
        (
            scale[..., low] | scale[..., high] >> 4 << 6,
            shift[..., low] | shift[..., high] >> 4 << 6,
            scale[..., high] & 15 | (shift[..., high] & 15) << 4,
        ),
        -1,
    )


def _levels_of(x: torch.Tensor, how: _Search) -> tuple[torch.Tensor, ...]:
    """Levels uint8 (N, B, 8, 32), then scales, shifts and their steps in storage form."""
    weight = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    scale, shift = _with_shift(x, weight, how)
    scales, step = _six_bits(scale)
    shifts, least = _six_bits(shift)
    each = step.float() * scales.float()
    less = least.float() * shifts.float()
    level = ((x + less[..., None]) / each[..., None].clamp_min(_MIN)).round()
    level = torch.where(each[..., None] > 0, level.clamp(0, how.levels), 0.0)
    return level.to(torch.uint8), scales, shifts, step, least


def _nibbles(level: torch.Tensor) -> torch.Tensor:
    """Pack groups of 32 in pairs: the first of a pair is in the low nibbles of 32 bytes."""
    pairs = level.unflatten(-2, (4, 2))
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)


def _q4_k(x: torch.Tensor) -> torch.Tensor:
    level, scales, shifts, step, least = _levels_of(x.unflatten(-1, (8, 32)), _FOUR)
    head = _bytes(step), _bytes(least), _packed_scales(scales, shifts)
    return torch.cat((*head, _nibbles(level)), -1)


def _q5_k(x: torch.Tensor) -> torch.Tensor:
    level, scales, shifts, step, least = _levels_of(x.unflatten(-1, (8, 32)), _FIVE)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((level >> 4) << places).sum(-2).to(torch.uint8)
    head = _bytes(step), _bytes(least), _packed_scales(scales, shifts)
    return torch.cat((*head, high, _nibbles(level & 15)), -1)


def _q6_k(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (16, 16))
    scale = _around_zero(groups, 32)
    extreme = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))
    step = _half(extreme / -128)
    steps = step.float()
    inverse = torch.where(steps == 0, 0.0, 1 / torch.where(steps == 0, 1.0, steps))
    scales = (scale * inverse).round().clamp(-128, 127)
    each = (steps * scales)[..., None]
    level = groups / torch.where(each == 0, 1.0, each)
    level = torch.where(each == 0, 0.0, level.round().clamp(-32, 31))
    level = (level + 32).to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    low = torch.cat([level[..., i, :] & 15 | (level[..., i + 2, :] & 15) << 4 for i in (0, 1)], -1)
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    high = ((level >> 4) << places).sum(-2).to(torch.uint8)
    parts = low.flatten(-2), high.flatten(-2), _bytes(scales.to(torch.int8)), _bytes(step)
    return torch.cat(parts, -1)


def _two_bits(level: torch.Tensor) -> torch.Tensor:
    """Pack 2-bit levels (..., 256); of 128 numbers the first 32 are in the lowest bits."""
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    return (level.unflatten(-1, (2, 4, 32)) << places).sum(-2).to(torch.uint8).flatten(-2)


def _q3_k(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (16, 16))
    scale = _around_zero(groups, 4)
    extreme = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))
    step = _half(extreme / -32)
    steps = step.float()
    inverse = torch.where(steps == 0, 0.0, 1 / torch.where(steps == 0, 1.0, steps))
    scales = (scale * inverse).round().clamp(-32, 31)
    each = (steps * scales)[..., None]
    level = groups / torch.where(each == 0, 1.0, each)
    level = torch.where(each == 0, 0.0, level.round().clamp(-4, 3))
    level = (level + 4).to(torch.uint8).flatten(-2)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((level >> 2).unflatten(-1, (8, 32)) << places).sum(-2).to(torch.uint8)
    stored = (scales + 32).to(torch.uint8)
    low = stored[..., :8] & 15 | (stored[..., 8:] & 15) << 4
    pairs = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    upper = ((stored >> 4).unflatten(-1, (4, 4)) << pairs).sum(-2).to(torch.uint8)
    return torch.cat((high, _two_bits(level & 3), low, upper, _bytes(step)), -1)


def _q2_k(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (16, 16))
    scale, shift = _with_shift(groups, groups.abs(), _TWO)
    stored, steps = [], []
    for part in (scale, shift):
        step = _half(part.amax(-1, keepdim=True) / 15)
        level = (part / step.float().clamp_min(_MIN)).round().clamp(0, 15)
        stored.append(torch.where(step > 0, level, 0.0))
        steps.append(step)
    each, less = (s.float() * q for s, q in zip(steps, stored, strict=True))
    level = ((groups + less[..., None]) / each[..., None].clamp_min(_MIN)).round().clamp(0, 3)
    level = torch.where(each[..., None] > 0, level, 0.0).to(torch.uint8).flatten(-2)
    both = stored[0].to(torch.uint8) | stored[1].to(torch.uint8) << 4
    return torch.cat((both, _two_bits(level), *map(_bytes, steps)), -1)


KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
)
_ROWS = 1 << 20  # numbers processed at a time


def rounded_blocks(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Quantise a matrix (N, K) of whole blocks to one of `KINDS`: bytes (N, size of a row)."""
    rows, inputs = weight.shape
    each = max(1, _ROWS // inputs)
    made = [
        KINDS[kind](part.float().unflatten(1, (-1, BLOCK))).flatten(1)
        for part in weight.split(each)
    ]
    return torch.cat(made) if rows else torch.empty(0, 0, dtype=torch.uint8)
