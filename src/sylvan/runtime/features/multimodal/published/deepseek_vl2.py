"""DeepSeek-VL2: SigLIP over tiles, four patches a vector, a separator behind each row.

Source: arXiv:2412.10302, section 2, and modeling_deepseek_vl_v2.py of the published code. The
tensors have the names of the timm library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sylvan.runtime.features.multimodal.published.blocks import BlockShape, VisionBlock, side_of

_NAMES = (
    ("vision.patch_embed.proj.", "patch."),
    ("vision.pos_embed", "positions"),
    ("vision.blocks.", "layers."),
    ("vision.norm.", "last_norm."),
    ("projector.layers.", "projector."),
    ("image_newline", "image_newline"),
    ("view_seperator", "view_seperator"),  # as published
)
_IN_BLOCK = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj"}
_HEAD_DIM = 72  # of SigLIP so400m, unless config.json says how many heads there are


class DeepseekVL2Encoder(nn.Module):
    """Feature `pixel_values` (1 + tiles, 3, S, S): the whole image, then its tiles.

    `images_spatial_crop` (1, 2) counts tiles in a row, and rows.
    """

    def __init__(self, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        vision, projector = raw.get("vision_config") or {}, raw.get("projector_config") or {}
        for part, name, usual in (
            (raw, "tile_tag", "2D"),
            (raw, "global_view_pos", "head"),
            (projector, "projector_type", "downsample_mlp_gelu"),
            (projector, "depth", 2),
        ):
            if part.get(name, usual) != usual:
                raise ValueError(f"{name} {part[name]!r}")
        dim, channels, patch, _ = shapes["patch.weight"]
        shape = BlockShape(
            dim=dim,
            inner=shapes["layers.0.mlp.fc1.weight"][0],
            heads=int(vision.get("heads") or dim // _HEAD_DIM),
        )
        self._side = int(projector.get("downsample_ratio") or 2)
        self.patch = nn.Conv2d(channels, dim, patch, patch)
        self.positions = nn.Parameter(torch.empty(shapes["positions"]))
        count = sum(name.endswith("layer_norm1.weight") for name in shapes)
        self.layers = nn.ModuleList(VisionBlock(shape) for _ in range(count))
        self.last_norm = nn.LayerNorm(dim, eps=shape.eps)
        middle, wide = shapes["projector.0.weight"]
        out = shapes["projector.2.weight"][0]
        self.projector = nn.Sequential(nn.Linear(wide, middle), nn.GELU(), nn.Linear(middle, out))
        self.image_newline = nn.Parameter(torch.empty(out))
        self.view_seperator = nn.Parameter(torch.empty(out))

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
        if part == "attn.qkv":
            parts = zip("qkv", tensor.chunk(3), strict=True)
            return {f"{layers}.{number}.self_attn.{n}_proj.{kind}": x for n, x in parts}
        return {f"{layers}.{number}.{_IN_BLOCK.get(part, part)}.{kind}": tensor}

    def forward(
        self, pixel_values: torch.Tensor, images_spatial_crop: torch.Tensor
    ) -> torch.Tensor:
        """Return the vectors of one image, (N, D)."""
        x_BSD = self.patch(pixel_values).flatten(2).transpose(1, 2) + self.positions
        for block in self.layers:
            x_BSD = block(x_BSD)
        tiles = self.projector(self._joined(self.last_norm(x_BSD)))
        grid = tiles.unflatten(1, (side_of(tiles.shape[1]), -1))
        across, down = (int(n) for n in images_spatial_crop[0])
        parts = grid[1 : 1 + across * down].unflatten(0, (down, across))
        whole = parts.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
        return torch.cat((self._lines(grid[0]), self.view_seperator[None], self._lines(whole)))

    def _joined(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Squares of patches, channel by channel; zeros fill up the last ones."""
        side = side_of(x_BSD.shape[1])
        x_BDHW = x_BSD.transpose(1, 2).unflatten(2, (side, side))
        pad = -side % self._side
        x_BDHW = functional.pad(x_BDHW, (0, pad, 0, pad))
        return functional.unfold(x_BDHW, self._side, stride=self._side).transpose(1, 2)

    def _lines(self, grid_HWD: torch.Tensor) -> torch.Tensor:
        """Rows with a separator behind each, (N, D)."""
        end = self.image_newline.expand(len(grid_HWD), 1, -1)
        return torch.cat((grid_HWD, end), 1).flatten(0, 1)
