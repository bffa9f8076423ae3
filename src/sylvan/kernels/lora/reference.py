"""Reference in PyTorch, which also runs on devices: rows are gathered by adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.adapters import Factors, LoraLayer


def lora(x: torch.Tensor, y: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    for slot, listed in layer.rows.taken if layer.of_outputs else layer.rows.groups:
        _change(x, y, listed.to(x.device), layer, slot)
    return y


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a row of the step and one of its experts. Shapes: int64 (P,)."""

    rows: torch.Tensor
    experts: torch.Tensor


def lora_experts(x: torch.Tensor, y: torch.Tensor, pairs: Pairs, layer: LoraLayer) -> None:
    """`lora` for pairs, each with its expert's matrices, in place. Shapes: (P, K), (P, N)."""
    for slot, listed in layer.rows.groups:
        own = torch.isin(pairs.rows, listed.to(x.device))
        for expert in pairs.experts[own].unique().tolist():
            found = (own & (pairs.experts == expert)).nonzero().flatten()
            _change(x, y, found, layer, slot, expert)


def lora_embedding(ids: torch.Tensor, y: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    for slot, listed in layer.rows.groups:
        (factors,) = layer.factors(slot)
        if factors is not None:
            rows = listed.to(y.device)
            _add(y, rows, slice(None), factors.down.T[ids[rows].long()], factors)
    return y


def _change(
    x: torch.Tensor,
    y: torch.Tensor,
    rows: torch.Tensor,
    layer: LoraLayer,
    slot: int,
    expert: int = 0,
) -> None:
    x_RK = x[rows].float()
    column = 0
    for factors, size in zip(layer.factors(slot, expert), layer.outputs, strict=True):
        if factors is not None:
            inner_RL = (x_RK @ factors.down.float().T).to(x.dtype)
            _add(y, rows, slice(column, column + size), inner_RL, factors)
        column += size


def _add(
    y: torch.Tensor, rows: torch.Tensor, cols: slice, inner_RL: torch.Tensor, factors: Factors
) -> None:
    changed = y[rows, cols].float() + inner_RL.float() @ factors.up.float().T * factors.scale
    y[rows, cols] = changed.to(y.dtype)
