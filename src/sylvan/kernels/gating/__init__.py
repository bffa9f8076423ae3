"""Element-wise non-linearities, with and without a gate."""

from __future__ import annotations

import torch

from sylvan.kernels.api import ActivationKind, Clamping, TracedTensor, X
from sylvan.kernels.gating import reference
from sylvan.kernels.gpu.choice import KernelDispatch

_glu = KernelDispatch("gating.glu", reference.glu)
_activation = KernelDispatch("gating.activation", reference.activation)


def glu(gate_up: X, kind: ActivationKind, clamping: Clamping | None = None) -> X:
    """act(gate) * up of rows [gate | up]. Shape: (T, 2 F) to (T, F); rounded once."""
    if isinstance(gate_up, TracedTensor):
        return gate_up.tracer.glu(gate_up, kind, clamping)
    return _glu.on(gate_up)(gate_up, kind, clamping)


def activation(x: X, kind: ActivationKind) -> X:
    """The non-linearity of each element; `relu2` is the square of relu."""
    if isinstance(x, TracedTensor):
        return x.tracer.activation(x, kind)
    return _activation.on(x)(x, kind)


def xielu(
    x: X, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> X:
    """The activation of Apertus, with learnt slopes (arXiv:2411.13010); numbers of shape (1,)."""
    if isinstance(x, TracedTensor):
        return x.tracer.xielu(x, (alpha_p, alpha_n, beta, eps))
    return reference.xielu(x, alpha_p, alpha_n, beta, eps)
