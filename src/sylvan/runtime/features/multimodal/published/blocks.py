"""Parts that the encoders share.

Shapes: B images or tiles, S patches of each, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """Sizes of a transformer block.

    Attributes:
        dim: Columns.
        inner: Columns of its feed-forward.
        heads: Heads.
        act: Activation: `gelu`, `gelu_tanh` or `quick_gelu`.
        eps: Of its norms.
    """

    dim: int
    inner: int
    heads: int
    act: str = "gelu"
    eps: float = 1e-6


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """Apply an activation by its name in `BlockShape`."""
    if act == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return functional.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


class VisionBlock(nn.Module):
    """Attention of all patches to each other, and a feed-forward; each after a norm.

    Module names are those of SigLIP in transformers.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        dim = shape.dim
        self._heads, self._act = shape.heads, shape.act
        self.layer_norm1 = nn.LayerNorm(dim, eps=shape.eps)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(dim, dim) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        )
        self.layer_norm2 = nn.LayerNorm(dim, eps=shape.eps)
        sizes = {"fc1": (dim, shape.inner), "fc2": (shape.inner, dim)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})

    def forward(self, x_BSD: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
        """Shape: (B, S, D) -> (B, S, D); `angles`: rotary angles of column pairs, (S, pairs)."""
        h_BSD, attn = self.layer_norm1(x_BSD), self.self_attn
        q, k, v = (
            attn[name](h_BSD).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if angles is not None:
            q, k = (rotated(part, angles) for part in (q, k))
        out = functional.scaled_dot_product_attention(q, k, v)
        x_BSD = x_BSD + attn["out_proj"](out.transpose(1, 2).flatten(2))
        h_BSD = activate(self.mlp["fc1"](self.layer_norm2(x_BSD)), self._act)
        return x_BSD + self.mlp["fc2"](h_BSD)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring columns, (..., S, 2 * pairs), by angles (S, pairs)."""
    wide = x.float().unflatten(-1, (-1, 2))
    cos, sin = angles.cos(), angles.sin()
    even, odd = wide[..., 0], wide[..., 1]
    found = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return found.flatten(-2).to(x.dtype)


def merged(x_BSD: torch.Tensor, side: int = 2) -> torch.Tensor:
    """Join squares of patches: (B, H, W, D) -> (B, H / side, W / side, side * side * D)."""
    x = x_BSD.unflatten(2, (-1, side)).unflatten(1, (-1, side))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(3)


def side_of(count: int) -> int:
    """The side of a square of `count` patches."""
    return round(count**0.5)
