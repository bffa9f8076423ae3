"""Matrix multiplication with a weight that may be sharded, fused or quantised.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import ActivationKind, LinearWeight, X
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.mesh import Share, Split


class Linear(nn.Module):
    """y = x W^T + b with the unsharded weight on every rank.

    `parts` are the output sizes, on this rank, of the checkpoint tensors joined in this one.
    Loading may replace `weight` by any `LinearWeight`. `lora` is set if requests may use adapters;
    it holds this rank's shards of their matrices.
    """

    weight: LinearWeight
    bias: torch.Tensor | None
    lora: LoraLayer | None = None

    def __init__(
        self, build: Build, inputs: int | Split, parts: tuple[int, ...] | Split, *, bias: bool
    ) -> None:
        super().__init__()
        outputs = parts if isinstance(parts, Split) else sum(parts)
        self.parts = parts.sizes if isinstance(parts, Split) else parts
        self.weight = build.empty(outputs, inputs)
        self.bias = build.empty(outputs) if bias else None

    def forward(self, x: X, *, out_f32: bool = False) -> X:
        """Shape: (T, K) -> (T, N), dtype of x or float32."""
        return self.adapted(x, self.product(x, out_f32=out_f32))

    def gated(self, x: X, kind: ActivationKind) -> X:
        """act(gate) * up of the outputs, gates first. Shape: (T, K) -> (T, N / 2)."""
        if self.lora is None and isinstance(x, torch.Tensor) and x.numel() == x.shape[-1]:
            return ops.gated_linear(x, self.weight, self.bias, kind)
        return ops.glu(self(x), kind)

    def product(self, x: X, *, out_f32: bool = False) -> X:
        """This rank's x W^T + b, without adapters."""
        return ops.linear(x, self.weight, self.bias, out_f32=out_f32)

    @property
    def is_collective(self) -> bool:
        """Whether `forward` communicates with other ranks."""
        return False

    def adapted(self, x: X, y: X) -> X:
        """Add the adapters' outputs for x to y, in place."""
        return y if self.lora is None else ops.lora(x, y, self.lora)


class ColumnParallel(Linear):
    """Outputs are sharded over ranks, each part separately: evenly unless `parts` is a split."""

    def __init__(
        self,
        build: Build,
        inputs: int,
        parts: tuple[int, ...] | Split,
        *,
        bias: bool = False,
    ) -> None:
        if not isinstance(parts, Split):
            parts = build.mesh.split("output features", *parts)
        super().__init__(build, inputs, parts, bias=bias)


class RowParallel(Linear):
    """Inputs are sharded over ranks; the products are summed over ranks, then the bias is added."""

    def __init__(
        self, build: Build, inputs: int | Share, outputs: int, *, bias: bool = False
    ) -> None:
        if not isinstance(inputs, Share):
            inputs = build.mesh.share(inputs, "input features")
        super().__init__(build, Split(inputs), (outputs,), bias=bias)
        self._ranks = build.mesh.sharing(inputs)
        self._parts = build.mesh.partial_sums(inputs, "input features")

    @property
    def is_collective(self) -> bool:
        return self._ranks.size > 1

    def product(self, x: X, *, out_f32: bool = False) -> X:
        """The product, summed in parts if `Mesh.same_bits` needs it."""
        return ops.linear(x, self.weight, self.bias, out_f32=out_f32, parts=self._parts)

    def forward(self, x: X, *, out_f32: bool = False) -> X:
        """Shape: (T, K of this rank) -> (T, N), dtype of x or float32; the same on every rank.

        Adapter outputs are summed over ranks together with the products.
        """
        if not self.is_collective:
            return super().forward(x, out_f32=out_f32)
        product = ops.linear(x, self.weight, None, out_f32=True, parts=self._parts)
        partial = self.adapted(x, product)
        like = partial if out_f32 else x
        return ops.all_reduce(partial, self._ranks, self.bias, like=like)


class VocabHead(ColumnParallel):
    """Logits: the vocabulary is sharded over ranks, and every rank gathers all logits."""

    def __init__(self, build: Build, inputs: int, num_ids: int, *, bias: bool = False) -> None:
        super().__init__(build, inputs, Split(build.mesh.rows(num_ids)), bias=bias)
        self._ranks, self._num_ids = build.mesh.tp, num_ids

    @property
    def is_collective(self) -> bool:
        return self._ranks.size > 1

    def forward(self, x: X, *, out_f32: bool = False) -> X:
        """Shape: (T, K) -> (T, V)."""
        mine = super().forward(x, out_f32=out_f32)
        return ops.all_gather(mine, self._ranks, self._num_ids) if self.is_collective else mine
