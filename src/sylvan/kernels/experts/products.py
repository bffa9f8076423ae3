"""Multiplies each row by one matrix of a stack, selected by a router (JetMoE, LongCat).

Shapes: P rows, E experts, C columns, N outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class ExpertProduct(Protocol):
    """Multiplies each row by the matrix of its expert."""

    def __call__(
        self, x_PC: torch.Tensor, stack_ENC: torch.Tensor, experts_P: torch.Tensor
    ) -> torch.Tensor:
        """Shape: (P, N). Rows whose expert number is out of range give zeros."""
        ...


def expert_product(
    x_PC: torch.Tensor, stack_ENC: torch.Tensor, experts_P: torch.Tensor
) -> torch.Tensor:
    """Implements `ExpertProduct` in PyTorch, expert by expert."""
    out = x_PC.new_zeros(len(x_PC), stack_ENC.shape[1])
    for expert in experts_P.unique().tolist():
        if 0 <= expert < len(stack_ENC):
            rows = experts_P == expert
            out[rows] = functional.linear(x_PC[rows], stack_ENC[expert])
    return out
