"""Choosing rows, and arithmetic on whole rows."""

from __future__ import annotations

import torch

from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.rows import reference

_take_rows = KernelDispatch("rows.take_rows", reference.take_rows)
_add = KernelDispatch("rows.add", reference.add)
_scale = KernelDispatch("rows.scale", reference.scale)
_softcap = KernelDispatch("rows.softcap", reference.softcap)


def take_rows(x: X, rows: X) -> X:
    """Select the rows that are sampled. Shape: (T, D) to (R, D).

    When traced, do not use `x` afterwards: its op may then compute only these rows.
    """
    if isinstance(x, TracedTensor):
        assert isinstance(rows, TracedTensor)
        return x.tracer.take_rows(x, rows)
    assert isinstance(rows, torch.Tensor)
    return _take_rows.on(x)(x, rows)


def add(a: X, b: X, scale: float = 1.0) -> X:
    """A new matrix a + scale * b, in the dtype of a."""
    if isinstance(a, TracedTensor):
        assert isinstance(b, TracedTensor)
        return a.tracer.add(a, b, scale)
    assert isinstance(b, torch.Tensor)
    return _add.on(a)(a, b, scale)


def scale(x: X, factor: float) -> X:
    """A new matrix x * factor."""
    if isinstance(x, TracedTensor):
        return x.tracer.scale(x, factor)
    return _scale.on(x)(x, factor)


def scale_rows(x: X, factors: X) -> X:
    """A new matrix: row t of x (T, D) times factor t of (T, 1), rounded once."""
    if isinstance(x, TracedTensor):
        assert isinstance(factors, TracedTensor)
        return x.tracer.scale_rows(x, factors)
    assert isinstance(factors, torch.Tensor)
    return x * factors


def softcap(x: X, cap: float) -> X:
    """A new matrix cap * tanh(x / cap)."""
    if isinstance(x, TracedTensor):
        return x.tracer.softcap(x, cap)
    return _softcap.on(x)(x, cap)


def clamp(x: X, limit: float) -> X:
    """A new matrix: x clamped to [-limit, limit]."""
    if isinstance(x, TracedTensor):
        return x.tracer.clamp(x, limit)
    return x.clamp(-limit, limit)
