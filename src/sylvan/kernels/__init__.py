"""One folder per op: PyTorch reference, C++ for CPUs, Triton for GPUs; chosen by capability.

The ops are functions of `sylvan.kernels.ops`, also found here by name. They import torch, so they
are loaded when first asked for: what a machine can do (`describe`) is known without it.
"""

from __future__ import annotations

import importlib
from typing import Any

from sylvan.kernels.native.library import describe

__all__ = ["describe"]

OPS = (
    "activation",
    "add",
    "attention",
    "embedding",
    "glu",
    "layer_norm",
    "linear",
    "rms_norm",
    "scale",
    "softcap",
    "take_rows",
)


def __getattr__(name: str) -> Any:
    if name in OPS:
        return getattr(importlib.import_module("sylvan.kernels.ops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
