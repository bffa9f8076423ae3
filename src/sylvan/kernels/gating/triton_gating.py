"""Element-wise non-linearities on GPUs; a program does a block of columns of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import ActivationKind, Clamping
from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import ceil_div
from sylvan.kernels.gpu.triton_early import inputs_ready

_BLOCK = 1024


@triton.jit
def tanh(x):
    """Hyperbolic tangent. Saturates without overflow: if exp(2 x) is infinite, 2 / inf is 0."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _act(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x * _sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    elif KIND == "quick_gelu":
        y = x * _sigmoid(1.702 * x)
    elif KIND == "sigmoid":
        y = _sigmoid(x)
    else:
        tl.static_assert(KIND == "tanh")
        y = tanh(x)
    return y


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr, CLAMP: tl.constexpr):
    """act(gate) * up, clamped as `Clamping.form` says unless that is empty; float32."""
    if CLAMP != "":
        up = tl.minimum(tl.maximum(up, -limit), limit)
        if CLAMP != "outputs":
            gate = tl.minimum(gate, limit)
    if CLAMP == "gpt_oss":
        y = (up + 1.0) * gate * _sigmoid(gate * alpha)
    elif CLAMP == "outputs":
        y = tl.minimum(_act(gate, KIND), limit) * up
    else:
        if CLAMP != "":
            tl.static_assert(CLAMP == "inputs")
        y = _act(gate, KIND) * up
    return y


@triton.jit
def _glu_kernel(
    x_ptr,
    y_ptr,
    width,
    x_stride,
    alpha,
    limit,
    KIND: tl.constexpr,
    CLAMP: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    inputs_ready(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    gate = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + col, mask=inside, other=0.0).to(tl.float32)
    y = gated(gate, up, alpha, limit, KIND, CLAMP)
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_kernel(
    x_ptr, y_ptr, total, KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    inputs_ready(EARLY)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < total, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, _act(x, KIND).to(y_ptr.dtype.element_ty), mask=i < total)


def glu(
    gate_up: torch.Tensor, kind: ActivationKind, clamping: Clamping | None = None
) -> torch.Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    width = rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    alpha, limit, form = clamp_arguments(clamping)
    launch_early(
        _glu_kernel,
        (len(rows), ceil_div(width, _BLOCK)),
        rows,
        out,
        width,
        rows.stride(0),
        alpha,
        limit,
        KIND=kind,
        CLAMP=form,
        BLOCK=_BLOCK,
    )
    return out


def clamp_arguments(clamping: Clamping | None) -> tuple[float, float, str]:
    """Alpha, limit and form, as kernels take them."""
    if clamping is None:
        return 1.0, 0.0, ""
    return clamping.alpha, clamping.limit, clamping.form


def activation(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (ceil_div(x.numel(), _BLOCK),)
    launch_early(_activation_kernel, grid, x, out, x.numel(), KIND=kind, BLOCK=_BLOCK)
    return out
