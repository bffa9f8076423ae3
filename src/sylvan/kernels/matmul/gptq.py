"""GPTQ (Frantar et al., arXiv:2210.17323): rounds a matrix by the inputs of its layer.

The rounding error of each column is compensated in the columns that are not rounded yet, weighted
by the covariance of the inputs, which minimises the change of outputs.

Shapes: N outputs, K inputs, T rows.
"""

from __future__ import annotations

import torch

from sylvan.kernels.matmul.codes import paired
from sylvan.kernels.matmul.weights import CodedWeight

_BLOCK = 128  # columns per block of lazy updates
_DAMP = 0.01  # share of the diagonal's mean that is added to the diagonal
_HALF_MAX = 65504.0


class Moments:
    """Sum of x^T x over all added rows. `sums`: (K, K) float32."""

    def __init__(self, inputs: int) -> None:
        self.sums = torch.zeros(inputs, inputs)
        self.rows = 0

    def add(self, x_TK: torch.Tensor) -> None:
        """Add input rows of the layer."""
        rows = x_TK.reshape(-1, x_TK.shape[-1]).float()
        self.sums.addmm_(rows.T, rows)
        self.rows += len(rows)


def gptq_int4(weight: torch.Tensor, moments: Moments, group: int) -> CodedWeight:
    """Round to symmetric 4-bit levels with a float16 scale per `group` inputs.

    Raises:
        ValueError: The sums are not finite.
    """
    w, inverse = weight.float().clone(), _inverse(moments.sums)
    rows, cols = w.shape
    levels = torch.empty(rows, cols, dtype=torch.uint8)
    scales = torch.empty(rows, cols // group)
    for start in range(0, cols, _BLOCK):
        stop = min(start + _BLOCK, cols)
        errors = torch.zeros(rows, stop - start)
        for k in range(start, stop):
            if k % group == 0:
                # Includes the errors of all earlier columns.
                scales[:, k // group] = _scale(w[:, k : k + group])
            scale = scales[:, k // group]
            level = (w[:, k] / scale).round().clamp(-8, 7)
            levels[:, k] = (level + 8).to(torch.uint8)
            error = (w[:, k] - level * scale) / inverse[k, k]
            w[:, k:stop] -= error[:, None] * inverse[k, k:stop]
            errors[:, k - start] = error
        w[:, stop:] -= errors @ inverse[start:stop, stop:]
    return CodedWeight(paired(levels), scales.half(), "int4", group)


def _scale(w: torch.Tensor) -> torch.Tensor:
    """Scales that map each row's value of largest magnitude to level -8, rounded to float16."""
    extreme = w.gather(1, w.abs().argmax(1, keepdim=True)).squeeze(1)
    scale = (extreme / -8).clamp(-_HALF_MAX, _HALF_MAX).half().float()
    return torch.where(scale == 0, 1.0, scale)


def _inverse(sums: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the damped sums."""
    h = sums.clone()
    if not h.isfinite().all():
        raise ValueError("rows of the calibration are not finite")
    diagonal = h.diagonal()
    idle = diagonal == 0  # inputs that were always zero
    diagonal[idle] = 1.0
    diagonal += _DAMP * diagonal.mean()
    whole = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(whole, upper=True)
