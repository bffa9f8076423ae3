"""Random weights, for benchmarks without a checkpoint."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from sylvan.kernels.matmul.weights import as_codes
from sylvan.runtime.models.checkpoint import LoadTargets
from sylvan.runtime.models.quantise import Format, convert, matrices
from sylvan.runtime.models.shards import take, whole_shape
from sylvan.runtime.models.slots import slots


def dummy_weights(model: nn.Module, seed: int = 0, quantise: Format | None = None) -> None:
    """Fill a model with seeded random values of plausible magnitude."""
    bits = dict(matrices(model, quantise)) if quantise else {}
    places = LoadTargets(model)
    for slot in list(slots(model)):
        parameter = slot.parameter
        if slot.attribute == "weight" and parameter.dim() == 1:
            parameter.data.fill_(1.0)
            continue
        key = seed ^ zlib.crc32(slot.name.encode())
        if parameter.device.type != "cpu" and slot.name not in bits:  # too many for the host
            there = torch.Generator(parameter.device).manual_seed(key)
            parameter.data.normal_(0.0, 0.02, generator=there)
            continue
        generator = torch.Generator().manual_seed(key)
        whole = torch.randn(whole_shape(parameter.shape, slot.splits), generator=generator)
        values = take(whole * 0.02, slot.splits)  # the same model, however many ranks hold it
        if slot.name in bits:
            made = convert(slot.name, values, bits[slot.name], quantise)
            on_cpu = parameter.device.type == "cpu"
            places.replace(parameter, made if on_cpu else as_codes(made).to(parameter.device))
        else:
            parameter.data.copy_(values)
