"""Scales that move the size of inputs into the weights that read them, before these are rounded.

AWQ (Lin et al., arXiv:2306.00978): inputs that are large on average get finer levels. SmoothQuant
(Xiao et al., arXiv:2211.10438): rows that are rounded to 8 bits have no outliers any more.

Shapes: N outputs, K inputs, T rows.
"""

from __future__ import annotations

import torch

from sylvan.kernels.matmul.gptq import Moments
from sylvan.kernels.matmul.weights import quantise_int4_codes

_STEPS = 20  # powers that are tried, from 0 on
_LEAST = 1e-4
_STRENGTH = 0.5  # how much of the spread of inputs SmoothQuant gives to the weights


class InputStatistics:
    """What a layer read: products of inputs, and the mean and largest magnitude of each."""

    def __init__(self, inputs: int) -> None:
        self.moments = Moments(inputs)
        self.top = torch.zeros(inputs)
        self._sums = torch.zeros(inputs)

    def add(self, x_TK: torch.Tensor) -> None:
        """More rows that the layer read."""
        rows = x_TK.reshape(-1, x_TK.shape[-1]).float().abs()
        self.moments.add(x_TK)
        self._sums += rows.sum(0)
        self.top = torch.maximum(self.top, rows.amax(0))

    @property
    def mean(self) -> torch.Tensor:
        """Of magnitudes. Shape: (K,)."""
        return self._sums / max(self.moments.rows, 1)


def awq_scales(weight: torch.Tensor, seen: InputStatistics, group: int) -> torch.Tensor:
    """Factors of a matrix's inputs, found by what rounding it to four bits does to its outputs.

    A power of the mean magnitudes; the 0th, which changes nothing, is among those that are tried.

    Args:
        weight: (N, K).
        seen: Of the rows that it reads.
        group: Inputs that share a scale.

    Returns: float32 (K,), for the weights; what they read is to be divided by it.

    Raises:
        ValueError: the rows were not finite.
    """
    _check(seen)
    w, best, least = weight.float(), torch.ones(weight.shape[1]), float("inf")
    for step in range(_STEPS):
        scales = _levelled(seen.mean.clamp(min=_LEAST) ** (step / _STEPS))
        error = quantise_int4_codes(w * scales, group).numbers().float() / scales - w
        loss = float(((error @ seen.moments.sums) * error).sum())
        if loss < least:
            best, least = scales, loss
    return best


def smoothquant_scales(weight: torch.Tensor, seen: InputStatistics) -> torch.Tensor:
    """Factors of a matrix's inputs by which both become alike in size; as of `awq_scales`."""
    _check(seen)
    reach = weight.float().abs().amax(0).clamp(min=_LEAST)
    return _levelled(seen.top.clamp(min=_LEAST) ** _STRENGTH / reach ** (1 - _STRENGTH))


def _check(seen: InputStatistics) -> None:
    if not seen.moments.sums.isfinite().all():
        raise ValueError("rows of the calibration are not finite")


def _levelled(scales: torch.Tensor) -> torch.Tensor:
    """The same around 1, so that weights keep their size."""
    return scales / (scales.max() * scales.min()).sqrt()
