"""Matrix multiplication with a weight that may be divided among ranks, fused, or quantised.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import LinearWeight, X
from sylvan.runtime.layers.build import Build


class Linear(nn.Module):
    """y = x W^T + b with the whole weight on every rank.

    `parts` are the output sizes of the checkpoint's tensors that are joined in this one, whole,
    before any division. `weight` may be replaced by any `LinearWeight` when loading. `lora` is set
    where requests may bring adapters.
    """

    weight: LinearWeight
    bias: torch.Tensor | None
    lora: LoraLayer | None = None

    def __init__(self, build: Build, inputs: int, parts: tuple[int, ...], *, bias: bool) -> None:
        super().__init__()
        self.parts = parts
        self.weight = build.empty(sum(parts), inputs)
        self.bias = build.empty(sum(parts)) if bias else None

    def forward(self, x: X, *, out_f32: bool = False) -> X:
        """Shape: (T, K) -> (T, N), dtype of x or float32."""
        y = self.product(x, out_f32=out_f32)
        return y if self.lora is None else ops.lora(x, y, self.lora)

    def product(self, x: X, *, out_f32: bool = False) -> X:
        """`forward` without adapters."""
        return ops.linear(x, self.weight, self.bias, out_f32=out_f32)

    def divide(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's share of one checkpoint tensor (weight or bias) of this layer."""
        return tensor

    def divide_lora(
        self, down: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of an adapter's matrices for one part. Shapes: (L, K), (N, L)."""
        return down, self.divide(up)


class ColumnParallel(Linear):
    """Outputs are divided among ranks, each part by itself."""

    def __init__(
        self, build: Build, inputs: int, parts: tuple[int, ...], *, bias: bool = False
    ) -> None:
        mine = tuple(build.shard.share(n, "output features") for n in parts)
        super().__init__(build, inputs, mine, bias=bias)
        self._shard = build.shard

    def divide(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Linear.divide`."""
        return self._shard.take(tensor, 0)


class RowParallel(Linear):
    """Inputs are divided among ranks; the sum over ranks belongs to the parallel executor."""

    def __init__(self, build: Build, inputs: int, outputs: int, *, bias: bool = False) -> None:
        mine = build.shard.share(inputs, "input features")
        super().__init__(build, mine, (outputs,), bias=bias)
        self._shard = build.shard

    def divide(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Linear.divide`. Every rank keeps the whole bias."""
        return self._shard.take(tensor, 1) if tensor.dim() > 1 else tensor

    def divide_lora(
        self, down: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Linear.divide_lora`: the sum over ranks is that of their shares of the inputs."""
        return self.divide(down), up
