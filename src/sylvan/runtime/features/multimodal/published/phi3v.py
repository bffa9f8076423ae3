"""Phi-3-Vision and Phi-3.5-Vision: CLIP over tiles, four patches a vector, and separators.

Source: image_embedding_phi3_v.py of the checkpoints. Sizes are those of the tensors; heads have 64
columns, as in every CLIP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sylvan.runtime.features.multimodal.published.blocks import (
    BlockShape,
    VisionBlock,
    merged,
    side_of,
)

_PREFIX = "model.vision_embed_tokens."
_CLIP = "img_processor.vision_model."
_HEAD_DIM = 64


class Phi3VEncoder(nn.Module):
    """Feature `pixel_values` (1, 1 + tiles, 3, S, S): the whole image, then its tiles.

    `image_sizes` (1, 2) are height and width of all tiles together, in pixels.
    """

    def __init__(self, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        dim, channels, patch, _ = shapes["patch.weight"]
        last = int((raw.get("img_processor") or {}).get("layer_idx", -2))
        count = sum(name.endswith("layer_norm1.weight") for name in shapes)
        shape = BlockShape(
            dim=dim,
            inner=shapes["layers.0.mlp.fc1.weight"][0],
            heads=dim // _HEAD_DIM,
            act="quick_gelu",
            eps=1e-5,
        )
        self.patch = nn.Conv2d(channels, dim, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(dim))
        self.positions = nn.Parameter(torch.empty(shapes["positions"]))
        self.first_norm = nn.LayerNorm(dim, eps=shape.eps)
        self.layers = nn.ModuleList(VisionBlock(shape) for _ in range(count + 1 + last))
        self.glb_GN = nn.Parameter(torch.empty(shapes["glb_GN"]))
        self.sub_GN = nn.Parameter(torch.empty(shapes["sub_GN"]))
        out, wide = shapes["projection.0.weight"]
        self.projection = nn.Sequential(nn.Linear(wide, out), nn.GELU(), nn.Linear(out, out))

    @staticmethod
    def convert(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Map a checkpoint's tensor to parameters of this module; empty: not the encoder's."""
        if not name.startswith(_PREFIX):
            return {}
        name = name.removeprefix(_PREFIX).removeprefix(_CLIP)
        for old, new in (
            ("embeddings.patch_embedding.", "patch."),
            ("embeddings.class_embedding", "class_embedding"),
            ("embeddings.position_embedding.weight", "positions"),
            ("pre_layrnorm.", "first_norm."),
            ("encoder.layers.", "layers."),
            ("img_projection.", "projection."),
        ):
            if name.startswith(old):
                name = new + name.removeprefix(old)
        unread = name.startswith(("post_layernorm.", "embeddings."))
        return {} if unread else {name: tensor}

    def forward(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> torch.Tensor:
        """Return the vectors of one image, (N, D)."""
        tiles = self._seen(pixel_values[0])
        grid = merged(tiles.unflatten(1, (side_of(tiles.shape[1]), -1)))
        size = pixel_values.shape[-1]
        height, width = (int(n) // size for n in image_sizes[0])
        parts = grid[1 : 1 + height * width].unflatten(0, (height, width))
        whole = parts.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
        rows = (self._lines(whole), self.glb_GN[0], self._lines(grid[0]))
        return self.projection(torch.cat(rows))

    def _seen(self, pixels_BCHW: torch.Tensor) -> torch.Tensor:
        x_BSD = self.patch(pixels_BCHW).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(x_BSD), 1, -1)
        x_BSD = self.first_norm(torch.cat((first, x_BSD), 1) + self.positions)
        for block in self.layers:
            x_BSD = block(x_BSD)
        return x_BSD[:, 1:]

    def _lines(self, grid_HWD: torch.Tensor) -> torch.Tensor:
        """Rows with a separator behind each, (N, D)."""
        end = self.sub_GN[0].expand(len(grid_HWD), 1, -1)
        return torch.cat((grid_HWD, end), 1).flatten(0, 1)
