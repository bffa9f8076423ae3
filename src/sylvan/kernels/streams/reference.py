"""The definition of correct, in PyTorch.

Shapes: T rows, S streams, D hidden.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sylvan.kernels.streams.parts import StreamParts


def spread(x_TD: torch.Tensor, count: int) -> torch.Tensor:
    return x_TD.float().repeat(1, count)


def collapse(streams: torch.Tensor, parts: StreamParts) -> tuple[torch.Tensor, torch.Tensor]:
    count, eps = parts.shape.streams, parts.shape.eps
    weights = _weights(streams, parts)
    sizes = [count, count, count * count]
    read, write, mix = (
        weight * scale + base
        for weight, scale, base in zip(
            weights.split(sizes, -1), parts.scale, parts.base.split(sizes), strict=True
        )
    )
    mix_TSS = mix.unflatten(-1, (count, count)).softmax(-1) + eps
    mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
    for _ in range(parts.shape.rounds - 1):
        mix_TSS = mix_TSS / (mix_TSS.sum(-1, keepdim=True) + eps)
        mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
    how = torch.cat((2 * write.sigmoid(), mix_TSS.flatten(1)), -1)
    return _read(streams, read.sigmoid() + eps), how


def expand(streams: torch.Tensor, out_TD: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    count = streams.shape[1] // out_TD.shape[1]
    streams_TSD = streams.unflatten(1, (count, -1))
    write_TS, mix_TSS = mix[:, :count], mix[:, count:].unflatten(1, (count, count))
    found = write_TS[..., None] * out_TD.float()[:, None] + mix_TSS.mT @ streams_TSD
    return found.flatten(1)


def total(streams: torch.Tensor, parts: StreamParts) -> torch.Tensor:
    weights = _weights(streams, parts) * parts.scale + parts.base
    return _read(streams, weights.sigmoid() + parts.shape.eps)


def _read(streams: torch.Tensor, read_TS: torch.Tensor) -> torch.Tensor:
    return (read_TS[..., None] * streams.unflatten(1, (read_TS.shape[1], -1))).sum(1)


def _weights(streams: torch.Tensor, parts: StreamParts) -> torch.Tensor:
    """Linear in the normed streams. Shape: (T, rows of fn)."""
    assert isinstance(parts.fn, torch.Tensor)
    mean = streams.square().mean(-1, keepdim=True)
    return functional.linear(streams * torch.rsqrt(mean + parts.shape.norm_eps), parts.fn)
