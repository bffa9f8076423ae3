"""The definition of correct, in PyTorch. It also serves devices: rows are gathered by adapter."""

from __future__ import annotations

import torch

from sylvan.kernels.adapters import LoraLayer


def lora(x: torch.Tensor, y: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    """See `lora.lora`."""
    for slot, listed in layer.rows.groups:
        rows = listed.to(x.device)
        x_RK = x[rows].float()
        column = 0
        for factors, size in zip(layer.factors(slot), layer.outputs, strict=True):
            if factors is not None:
                inner_RL = (x_RK @ factors.down.float().T).to(x.dtype).float()
                part = slice(column, column + size)
                changed = y[rows, part].float() + inner_RL @ factors.up.float().T * factors.scale
                y[rows, part] = changed.to(y.dtype)
            column += size
    return y
