"""InternVL 2.5 to 3.5 in their published layout: InternViT over tiles, four patches a vector.

Source: modeling_intern_vit.py and modeling_internvl_chat.py of the checkpoints. Sizes are those of
the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sylvan.runtime.features.multimodal.published.blocks import merged, side_of

_TOWER = "vision_model."


class _Block(nn.Module):
    """Attention and a feed-forward, each after a norm and multiplied by a scale of each column."""

    def __init__(self, sizes: Mapping[str, int], said: Mapping[str, Any]) -> None:
        super().__init__()
        dim, self._heads = sizes["dim"], int(said["num_attention_heads"])
        eps = float(said.get("layer_norm_eps", 1e-6))
        rms = said.get("norm_type", "layer_norm") == "rms_norm"
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.norm1, self.norm2 = norm(dim, eps=eps), norm(dim, eps=eps)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bool(said.get("qkv_bias", True)))
        self.proj = nn.Linear(dim, dim)
        self.q_norm = self.k_norm = None
        if said.get("qk_normalization", False):
            self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
        self.fc1, self.fc2 = nn.Linear(dim, sizes["inner"]), nn.Linear(sizes["inner"], dim)
        self.ls1, self.ls2 = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Shape: (B, S, D) -> (B, S, D)."""
        q, k, v = self.qkv(self.norm1(x_BSD)).chunk(3, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v)
        x_BSD = x_BSD + self.ls1 * self.proj(out.transpose(1, 2).flatten(2))
        return x_BSD + self.ls2 * self.fc2(functional.gelu(self.fc1(self.norm2(x_BSD))))


class InternVLEncoder(nn.Module):
    """Feature `pixel_values` (tiles, 3, S, S): tiles of an image, then the whole, if several."""

    def __init__(self, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        said = raw["vision_config"]
        if raw.get("ps_version", "v2") != "v2":
            raise ValueError("it shuffles pixels as in InternVL 1.5 (ps_version v1)")
        if said.get("hidden_act", "gelu") != "gelu":
            raise ValueError(f"its vision part has the activation {said['hidden_act']!r}")
        dim, channels, patch, _ = shapes["patch.weight"]
        sizes = {"dim": dim, "inner": shapes["layers.0.fc1.weight"][0]}
        count = sum(name.endswith(".fc1.weight") for name in shapes)
        self._side = round(1 / float(raw.get("downsample_ratio", 0.5)))
        self.patch = nn.Conv2d(channels, dim, patch, patch)
        self.class_embedding = nn.Parameter(torch.empty(shapes["class_embedding"]))
        self.positions = nn.Parameter(torch.empty(shapes["positions"]))
        last = int(raw.get("select_layer", -1))
        self.layers = nn.ModuleList(_Block(sizes, said) for _ in range(count + 1 + last))
        out, wide = shapes["projection.1.weight"]
        self.projection = nn.Sequential(
            nn.LayerNorm(wide), nn.Linear(wide, out), nn.GELU(), nn.Linear(out, out)
        )

    @staticmethod
    def convert(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Map a checkpoint's tensor to parameters of this module; empty: not the encoder's."""
        if name.startswith("mlp1."):
            return {name.replace("mlp1.", "projection.", 1): tensor}
        if not name.startswith(_TOWER):
            return {}
        name = name.removeprefix(_TOWER)
        for old, new in (
            ("embeddings.patch_embedding.", "patch."),
            ("embeddings.class_embedding", "class_embedding"),
            ("embeddings.position_embedding", "positions"),
            ("encoder.layers.", "layers."),
        ):
            if name.startswith(old):
                name = new + name.removeprefix(old)
        return {name.replace(".attn.", ".").replace(".mlp.", "."): tensor}

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the vectors of one image, (N, D)."""
        x_BSD = self.patch(pixel_values).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(x_BSD), 1, -1)
        x_BSD = torch.cat((first, x_BSD), 1) + self.positions
        for block in self.layers:
            x_BSD = block(x_BSD)
        side = side_of(x_BSD.shape[1] - 1)
        grid = merged(x_BSD[:, 1:].unflatten(1, (side, side)), self._side)
        return self.projection(grid).flatten(0, 2)
