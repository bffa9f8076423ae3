"""Marks the matrices of a model whose inputs are rounded to 8-bit floats, too."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sylvan.kernels.matmul.weights import CodedWeight, takes_fp8
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.linear import Linear


def round_to_fp8(model: nn.Module) -> None:
    """Round the inputs of linear layers to e4m3 where kernels can; experts keep theirs.

    Raises:
        ConfigError: there is no such matrix.
    """
    count = 0
    for module in model.modules():
        weight = module.weight if isinstance(module, Linear) else None
        if isinstance(weight, CodedWeight) and takes_fp8(weight):
            assert isinstance(module, Linear)
            module.weight = replace(weight, fp8_inputs=True)
            count += 1
    if not count:
        raise ConfigError(
            "fp8_activations=true, but no linear layer of the model is FP8 by tensor, channel or "
            "block of 128 inputs; leave it at false"
        )
