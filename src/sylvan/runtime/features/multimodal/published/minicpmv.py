"""MiniCPM-V 2.6: SigLIP over slices of any shape, resampled to a fixed number of vectors.

Source: arXiv:2408.01800, section 3, and modeling_navit_siglip.py and resampler.py of the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sylvan.runtime.features.multimodal.published.blocks import BlockShape, VisionBlock

_HEAD_DIM = 128  # of the resampler
_NAMES = (
    ("vpm.embeddings.patch_embedding.", "patch."),
    ("vpm.embeddings.position_embedding.weight", "positions"),
    ("vpm.encoder.layers.", "layers."),
    ("vpm.post_layernorm.", "last_norm."),
    ("resampler.", ""),
)


class MiniCPMVEncoder(nn.Module):
    """Features `pixel_values` (S, 3, P, P), patches of all slices, and `tgt_sizes` (slices, 2)."""

    def __init__(self, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        vision = raw["vision_config"]
        dim, channels, patch, _ = shapes["patch.weight"]
        shape = BlockShape(
            dim=dim,
            inner=int(vision["intermediate_size"]),
            heads=int(vision["num_attention_heads"]),
            act="gelu_tanh",
        )
        self.patch = nn.Conv2d(channels, dim, patch, patch)
        self.positions = nn.Parameter(torch.empty(shapes["positions"]))
        self._side = round(len(self.positions) ** 0.5)
        count = sum(name.endswith("layer_norm1.weight") for name in shapes)
        self.layers = nn.ModuleList(VisionBlock(shape) for _ in range(count))
        self.last_norm = nn.LayerNorm(dim, eps=shape.eps)
        queries, wide = shapes["query"]
        self._heads = max(1, wide // _HEAD_DIM)
        self.query = nn.Parameter(torch.empty(queries, wide))
        self.kv_proj = nn.Linear(dim, wide, bias=False)
        self.attn = nn.MultiheadAttention(wide, self._heads)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(wide, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(wide, wide))

    @staticmethod
    def convert(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Map a checkpoint's tensor to parameters of this module; empty: not the encoder's."""
        start, new = next((pair for pair in _NAMES if name.startswith(pair[0])), ("", ""))
        return {new + name.removeprefix(start): tensor} if start else {}

    def forward(self, pixel_values: torch.Tensor, tgt_sizes: torch.Tensor) -> torch.Tensor:
        """Return the vectors of one image, slice by slice, (N, D)."""
        sizes = [(int(height), int(width)) for height, width in tgt_sizes]
        parts = self.patch(pixel_values).flatten(1).split([h * w for h, w in sizes])
        return torch.cat([self._slice(x, *size) for x, size in zip(parts, sizes, strict=True)])

    def _slice(self, x_SD: torch.Tensor, height: int, width: int) -> torch.Tensor:
        x_BSD = (x_SD + self.positions[self._places(height, width)])[None]
        for block in self.layers:
            x_BSD = block(x_BSD)
        x_SD = self.ln_kv(self.kv_proj(self.last_norm(x_BSD)))[0]
        keys_SD = x_SD + self._sin_cos(height, width).to(x_SD)
        out_QD, _ = self.attn(self.ln_q(self.query), keys_SD, x_SD, need_weights=False)
        return self.ln_post(out_QD) @ self.proj

    def _places(self, height: int, width: int) -> torch.Tensor:
        """Where patches lie in the square grid of learned positions, (S,)."""
        side, device = self._side, self.positions.device
        bounds = torch.arange(1 / side, 1.0, 1 / side, device=device)
        rows, columns = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / n, device=device), bounds, right=True)
            for n in (height, width)
        )
        return (rows[:, None] * side + columns).flatten()

    def _sin_cos(self, height: int, width: int) -> torch.Tensor:
        """Sines and cosines of the column, then of the row, (S, D)."""
        quarter, device = self.query.shape[1] // 4, self.query.device
        speed = 10_000 ** -(torch.arange(quarter, device=device).float() / quarter)
        rows = torch.arange(height, device=device).float().repeat_interleave(width)
        columns = torch.arange(width, device=device).float().repeat(height)
        angles = [place[:, None] * speed for place in (columns, rows)]
        return torch.cat([f(x) for x in angles for f in (torch.sin, torch.cos)], 1)
