"""LoRA: rows of different requests in a step use different low-rank adapters."""

from __future__ import annotations

import torch

from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.lora import reference

_lora = KernelDispatch("lora.lora", reference.lora)


def lora(x: X, y: X, layer: LoraLayer) -> X:
    """Add the adapters' changes in place: y += scale * B (A x).

    Rows are those of the step, or with `layer.of_outputs` those that the LM head reads
    (`LoraRows.take`). Rows without an adapter stay unchanged and cost nothing. Sums are float32;
    A x is rounded to the dtype of x, and the result to that of y.

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
    """`lora` for an embedding: A is looked up by id. y += scale * B A[:, id], in place.

    Shape: ids (T,), y (T, N).
    Returns: y.
    """
    if isinstance(ids, TracedTensor):
        assert isinstance(y, TracedTensor)
        return ids.tracer.lora_embedding(ids, y, layer)
    assert isinstance(ids, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    return reference.lora_embedding(ids, y, layer)
