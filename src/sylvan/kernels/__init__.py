"""Kernels, one folder per group of ops: PyTorch reference, C++ for CPUs, Triton for GPUs.

Models call the functions of `ops`, which imports torch. With tensors they run the best kernel that
`registry` lists for the device; with traced tensors (`api`) they emit ops of a step program.
`native` traces, compiles and runs step programs by the C++ library, which `build` compiles; `xla`
lowers them to JAX. `gpu` has code that the Triton kernels share, and `aot` compiles these without a
GPU. `describe` says which C++ library this machine can run, without importing torch.
"""

from __future__ import annotations

from sylvan.kernels.native.library import describe

__all__ = ["describe"]
