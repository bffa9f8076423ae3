"""Kimi-VL's MoonViT: images of any size, positions that are learned and rotary.

Source: arXiv:2504.07491, section 2.1, and modeling_kimi_vl.py of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sylvan.runtime.features.multimodal.published.blocks import BlockShape, VisionBlock, merged

_NAMES = (
    ("vision_tower.patch_embed.proj.", "patch."),
    ("vision_tower.patch_embed.pos_emb.weight", "positions"),
    ("vision_tower.encoder.blocks.", "layers."),
    ("vision_tower.encoder.final_layernorm.", "last_norm."),
    ("multi_modal_projector.", ""),
)
_IN_BLOCK = {
    "norm0": "layer_norm1",
    "norm1": "layer_norm2",
    "wo": "self_attn.out_proj",
    "mlp.fc0": "mlp.fc1",
    "mlp.fc1": "mlp.fc2",
}


class KimiVLEncoder(nn.Module):
    """Features `pixel_values` (S, 3, P, P), row by row, and `image_grid_hws` (1, 2)."""

    def __init__(self, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        vision = raw["vision_config"]
        dim, channels, patch, _ = shapes["patch.weight"]
        shape = BlockShape(
            dim=dim,
            inner=int(vision["intermediate_size"]),
            heads=int(vision["num_attention_heads"]),
            act="gelu_tanh",
            eps=1e-5,
        )
        self._pairs = dim // shape.heads // 4  # of columns, for each axis
        self.patch = nn.Conv2d(channels, dim, patch, patch)
        self.positions = nn.Parameter(torch.empty(shapes["positions"]))
        layers = range(int(vision["num_hidden_layers"]))
        self.layers = nn.ModuleList(VisionBlock(shape) for _ in layers)
        self.last_norm = nn.LayerNorm(dim, eps=1e-5)
        self.pre_norm = nn.LayerNorm(dim, eps=1e-5)
        wide = shapes["linear_1.weight"][1]
        self.linear_1 = nn.Linear(wide, wide)
        self.linear_2 = nn.Linear(wide, shapes["linear_2.weight"][0])

    @staticmethod
    def convert(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Map a checkpoint's tensor to parameters of this module; empty: not the encoder's."""
        start, new = next((pair for pair in _NAMES if name.startswith(pair[0])), ("", ""))
        if not start:
            return {}
        name = new + name.removeprefix(start)
        if not name.startswith("layers."):
            return {name: tensor}
        layers, number, inside = name.split(".", 2)
        part, _, kind = inside.rpartition(".")
        if part == "wqkv":
            parts = zip("qkv", tensor.chunk(3), strict=True)
            return {f"{layers}.{number}.self_attn.{n}_proj.{kind}": x for n, x in parts}
        return {f"{layers}.{number}.{_IN_BLOCK[part]}.{kind}": tensor}

    def forward(self, pixel_values: torch.Tensor, image_grid_hws: torch.Tensor) -> torch.Tensor:
        """Return the vectors of one image, (N, D)."""
        height, width = (int(n) for n in image_grid_hws[0])
        x_SD = self.patch(pixel_values).flatten(1) + self._places(height, width)
        angles, x_BSD = self._angles(height, width), x_SD[None]
        for block in self.layers:
            x_BSD = block(x_BSD, angles)
        x_BSD = self.pre_norm(self.last_norm(x_BSD))
        rows = merged(x_BSD.unflatten(1, (height, width))).flatten(0, 2)
        return self.linear_2(functional.gelu(self.linear_1(rows)))

    def _places(self, height: int, width: int) -> torch.Tensor:
        """The learned positions, scaled to a grid, (S, D)."""
        if (height, width) == self.positions.shape[:2]:
            return self.positions.flatten(0, 1)
        table = self.positions.permute(2, 0, 1)[None]
        found = functional.interpolate(table, size=(height, width), mode="bicubic")
        return found[0].permute(1, 2, 0).flatten(0, 1)

    def _angles(self, height: int, width: int) -> torch.Tensor:
        """Rotary angles (S, 2 * pairs): of the column and of the row, in turn."""
        count = self._pairs
        device = self.positions.device
        speed = 10_000 ** -(torch.arange(count, device=device).float() / count)
        rows, columns = torch.meshgrid(
            torch.arange(height, device=device).float(),
            torch.arange(width, device=device).float(),
            indexing="ij",
        )
        angles = [place.flatten()[:, None] * speed for place in (columns, rows)]
        return torch.stack(angles, -1).flatten(1)
