"""Marks the FP8 matrices whose inputs kernels round to FP8, too (`fp8_activations`)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sylvan.kernels.matmul.weights import CodedWeight, takes_fp8
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.moe import Experts


def round_to_fp8(model: nn.Module) -> None:
    """Round the inputs of linear layers and experts to e4m3 where kernels can.

    Raises:
        ConfigError: there is no such matrix.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, Linear):
            names = ("weight",)
        elif isinstance(module, Experts):
            names = ("gate_up_proj", "down_proj")
        else:
            continue
        for name in names:
            weight = getattr(module, name)
            if isinstance(weight, CodedWeight) and takes_fp8(weight):
                setattr(module, name, replace(weight, fp8_inputs=True))
                count += 1
    if not count:
        raise ConfigError(
            "fp8_activations=true, but no matrix of the model is FP8 by tensor, channel or "
            "block of 128 inputs; leave it at false"
        )
