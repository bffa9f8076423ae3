"""AWQ and SmoothQuant: moves scales from the inputs into the weights, before rounding.

AWQ (Lin et al., arXiv:2306.00978) gives finer levels to inputs that are large on average.
SmoothQuant (Xiao et al., arXiv:2211.10438) removes outliers from rows that are rounded to 8 bits.

Shapes: N outputs, K inputs, T rows.
"""

from __future__ import annotations

import torch

from sylvan.kernels.matmul.gptq import Moments
from sylvan.kernels.matmul.weights import quantise_int4_codes

_STEPS = 20  # number of exponents to try, from 0 on
_MIN = 1e-4
_STRENGTH = 0.5  # SmoothQuant's alpha: share of the inputs' range that moves to the weights


class InputStatistics:
    """Statistics of a layer's inputs: sum of x^T x, and mean and largest magnitude per input."""

    def __init__(self, inputs: int) -> None:
        self.moments = Moments(inputs)
        self.top = torch.zeros(inputs)
        self._sums = torch.zeros(inputs)

    def add(self, x_TK: torch.Tensor) -> None:
        """Add input rows of the layer."""
        rows = x_TK.reshape(-1, x_TK.shape[-1]).float().abs()
        self.moments.add(x_TK)
        self._sums += rows.sum(0)
        self.top = torch.maximum(self.top, rows.amax(0))

    @property
    def mean(self) -> torch.Tensor:
        """Mean magnitudes. Shape: (K,)."""
        return self._sums / max(self.moments.rows, 1)


def awq_scales(weight: torch.Tensor, seen: InputStatistics, group: int) -> torch.Tensor:
    """Search the input scales that minimise the output error of rounding a matrix to four bits.

    Candidates are powers of the mean magnitudes, including the 0th, which changes nothing.

    Args:
        weight: (N, K).
        seen: Statistics of its inputs.
        group: Inputs that share a scale.

    Returns: float32 (K,), factors of the weights; divide the inputs by them.

    Raises:
        ValueError: The inputs were not finite.
    """
    _check(seen)
    w, best, least = weight.float(), torch.ones(weight.shape[1]), float("inf")
    for step in range(_STEPS):
        scales = _levelled(seen.mean.clamp(min=_MIN) ** (step / _STEPS))
        error = quantise_int4_codes(w * scales, group).numbers().float() / scales - w
        loss = float(((error @ seen.moments.sums) * error).sum())
        if loss < least:
            best, least = scales, loss
    return best


def smoothquant_scales(weight: torch.Tensor, seen: InputStatistics) -> torch.Tensor:
    """SmoothQuant's input scales, which balance inputs and weights; see `awq_scales`."""
    _check(seen)
    reach = weight.float().abs().amax(0).clamp(min=_MIN)
    return _levelled(seen.top.clamp(min=_MIN) ** _STRENGTH / reach ** (1 - _STRENGTH))


def _check(seen: InputStatistics) -> None:
    if not seen.moments.sums.isfinite().all():
        raise ValueError("rows of the calibration are not finite")


def _levelled(scales: torch.Tensor) -> torch.Tensor:
    """Normalise scales around 1, so that weights keep their magnitude."""
    return scales / (scales.max() * scales.min()).sqrt()
