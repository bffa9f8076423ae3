"""The definition of correct, in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sylvan.kernels.api import RowParts
from sylvan.kernels.collective.reference import mean_of_squares


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    offset: float,
    over: RowParts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.float() if residual is None else residual.float() + x.float()
    inverse = torch.rsqrt(mean_of_squares(total, over) + eps)
    return (total * inverse * (weight.float() + offset)).to(weight.dtype), total


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.float() if residual is None else residual.float() + x.float()
    scale, shift = (None if t is None else t.float() for t in (weight, bias))
    h = F.layer_norm(total, total.shape[-1:], scale, shift, eps)
    return h.to(x.dtype if weight is None else weight.dtype), total
