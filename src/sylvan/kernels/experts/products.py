"""Products of rows with matrices that a router chose, where more than an MLP is chosen.

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
        """Shape: (P, N). Rows whose number is not an expert's give zeros."""
        ...


def expert_product(
    x_PC: torch.Tensor, stack_ENC: torch.Tensor, experts_P: torch.Tensor
) -> torch.Tensor:
    """See `ExpertProduct`: expert by expert, as PyTorch computes it."""
    out = x_PC.new_zeros(len(x_PC), stack_ENC.shape[1])
    for expert in experts_P.unique().tolist():
        if 0 <= expert < len(stack_ENC):
            rows = experts_P == expert
            out[rows] = functional.linear(x_PC[rows], stack_ENC[expert])
    return out
