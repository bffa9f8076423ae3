"""The definition of correct, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn import functional as F

from sylvan.kernels.api import ActivationKind, Clamping

_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }
)


def glu(
    gate_up: torch.Tensor, kind: ActivationKind, clamping: Clamping | None = None
) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    if clamping is None:
        return (_FUNCTIONS[kind](gate) * up).to(gate_up.dtype)
    limit, form, alpha = clamping
    up = up.clamp(-limit, limit)
    if form == "outputs":
        return (_FUNCTIONS[kind](gate).clamp(max=limit) * up).to(gate_up.dtype)
    gate = gate.clamp(max=limit)
    if form == "inputs":
        return (_FUNCTIONS[kind](gate) * up).to(gate_up.dtype)
    return ((up + 1) * gate * torch.sigmoid(gate * alpha)).to(gate_up.dtype)


def activation(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    return _FUNCTIONS[kind](x.float()).to(x.dtype)


def xielu(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    wide, beta = x.float(), beta.float()
    above = F.softplus(alpha_p.float()) * wide.square()
    below = (torch.expm1(torch.minimum(wide, eps.float())) - wide) * (
        beta + F.softplus(alpha_n.float())
    )
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)
