"""Casts the float32 residual stream to the model's dtype, where no norm does it."""

from __future__ import annotations

import torch

from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.cast import reference


def cast(x: X, like: torch.Tensor) -> X:
    """The rows of x in the dtype of `like`, a parameter of the model."""
    if isinstance(x, TracedTensor):
        return x.tracer.cast(x)
    return reference.cast(x, like)
