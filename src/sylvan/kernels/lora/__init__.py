"""Low-rank adapters (LoRA): matrices of their own for the rows of some requests of a step."""

from __future__ import annotations

import torch

from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.lora import reference

_lora = KernelDispatch("lora.lora", reference.lora)


def lora(x: X, y: X, layer: LoraLayer) -> X:
    """Add what the adapters of this step change: y += scale * B (A x), in place.

    Rows are those of the step, or of `layer.of_outputs` those that the head takes
    (`LoraRows.take`). Rows whose request has no adapter stay as they are, and cost nothing. Sums
    are float32; A x is rounded to the type of x, and the result to that of y.

    Shape: x (T, K), y (T, N).
    Returns: y.
    """
    if isinstance(x, TracedTensor):
        assert isinstance(y, TracedTensor)
        return x.tracer.lora(x, y, layer)
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    return _lora.on(x)(x, y, layer)


def lora_embedding(ids: X, y: X, layer: LoraLayer) -> X:
    """The same for rows of an embedding: A is looked up by id. y += scale * B A[:, id], in place.

    Shape: ids (T,), y (T, N).
    Returns: y.
    """
    if isinstance(ids, TracedTensor):
        assert isinstance(y, TracedTensor)
        return ids.tracer.lora_embedding(ids, y, layer)
    assert isinstance(ids, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    return reference.lora_embedding(ids, y, layer)
