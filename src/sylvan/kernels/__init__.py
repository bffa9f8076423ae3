"""One folder per op: PyTorch reference, C++ for CPUs, Triton for GPUs; chosen by capability.

The ops are functions of `sylvan.kernels.ops`, which imports torch. `describe` lists what this
machine can run without importing it.
"""

from __future__ import annotations

from sylvan.kernels.native.library import describe

__all__ = ["describe"]
