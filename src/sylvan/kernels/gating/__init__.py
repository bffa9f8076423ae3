"""Element-wise non-linearities, with and without a gate."""

from __future__ import annotations

from sylvan.kernels.api import ActivationKind, Value, X
from sylvan.kernels.gating import reference
from sylvan.kernels.gpu.choice import Choice

_glu = Choice(reference.glu, "sylvan.kernels.gating.triton_gating")
_activation = Choice(reference.activation, "sylvan.kernels.gating.triton_gating")


def glu(gate_up: X, kind: ActivationKind) -> X:
    """act(gate) * up of rows [gate | up]. Shape: (T, 2 F) to (T, F); rounded once."""
    if isinstance(gate_up, Value):
        return gate_up.recorder.glu(gate_up, kind)
    return _glu.on(gate_up)(gate_up, kind)


def activation(x: X, kind: ActivationKind) -> X:
    """The non-linearity of each element; `relu2` is the square of relu."""
    if isinstance(x, Value):
        return x.recorder.activation(x, kind)
    return _activation.on(x)(x, kind)
