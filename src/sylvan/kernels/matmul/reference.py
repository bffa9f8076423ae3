"""The definition of correct, in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sylvan.kernels.api import ActivationKind, LinearWeight, Unsupported
from sylvan.kernels.collective.reference import tree_sum
from sylvan.kernels.gating.reference import glu
from sylvan.kernels.matmul.weights import CodedWeight, DeferredWeight, Int4Weight, Int8Weight

_HEAD_BLOCK = 16384  # rows of a weight converted to float32 at a time


def linear(
    x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    if isinstance(weight, DeferredWeight):
        weight = weight.load()
    if isinstance(weight, torch.Tensor):
        return _dense(x, weight, bias, out_f32)
    if isinstance(weight, CodedWeight):
        found = _dense(x.float(), weight.numbers(), None if bias is None else bias.float(), True)
        return found if out_f32 else found.to(x.dtype)
    assert isinstance(weight, Int8Weight | Int4Weight)
    out = _quantised(x, weight)
    if bias is not None:
        out = out + bias.float()
    return out if out_f32 else out.to(x.dtype)


def gated_linear(
    x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, kind: ActivationKind
) -> torch.Tensor:
    return glu(linear(x, weight, bias, out_f32=False), kind)


def linear_parts(
    x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, *, out_f32: bool, parts: int
) -> torch.Tensor:
    """Products over equal parts of the inputs, added in float32 as a tree."""
    if isinstance(weight, DeferredWeight):
        weight = weight.load()
    if not isinstance(weight, torch.Tensor):
        raise Unsupported("partial sums of a quantised matrix")
    pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
    total = tree_sum(torch.stack([_dense(part, w, None, out_f32=True) for part, w in pairs]))
    if bias is not None:
        total = total + bias.float()
    return total if out_f32 else total.to(x.dtype)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 levels (as float32) of each row, and the row's scale (T, 1)."""
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    # Dividing a Python number by a tensor would multiply by the reciprocal, and round twice.
    inverse = torch.where(top > 0, torch.full_like(top, 127.0) / top, 0.0)
    return (x * inverse).round(), top / 127


def _dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_f32: bool
) -> torch.Tensor:
    if not out_f32 or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    blocks = [F.linear(x.float(), block.float()) for block in weight.split(_HEAD_BLOCK)]
    out = torch.cat(blocks, -1)
    return out if bias is None else out + bias.float()


def _quantised(x: torch.Tensor, weight: Int8Weight | Int4Weight) -> torch.Tensor:
    levels, row_scale = quantise_rows(x)
    if isinstance(weight, Int8Weight):
        exact = (levels.double() @ weight.q.double().T).float()
        return exact * (weight.scale * row_scale)
    groups = levels.unflatten(-1, (-1, weight.group)).double()
    w = weight.levels().unflatten(-1, (-1, weight.group)).double()
    exact = torch.einsum("...gk,ngk->...ng", groups, w).float()
    return (exact * weight.scale).sum(-1) * row_scale
