"""From the float32 residual stream to the model's dtype, where no norm stands between."""

from __future__ import annotations

import torch

from sylvan.kernels.api import Unsupported, Value, X
from sylvan.kernels.cast import reference


def cast(x: X, like: torch.Tensor) -> X:
    """The rows of x in the dtype of `like`, a parameter of the model."""
    if isinstance(x, Value):
        if (x.dtype == "f32") != (like.dtype == torch.float32):
            raise Unsupported("rounding the residual stream without a norm")
        return x
    return reference.cast(x, like)
