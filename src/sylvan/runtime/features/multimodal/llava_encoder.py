"""LLaVA's encoder with a SigLIP tower, without transformers, so that it loads in milliseconds.

Modules and tensors have the names of the published code (arXiv:2303.15343, arXiv:2310.03744).
Shapes: N images, P patches of an image, D columns of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.media import MediaKind
from sylvan.runtime.features.multimodal.native_blocks import use_native_blocks
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.utils.json_files import read_json

_ACTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    }
)

_PREFIXES = ("vision_tower.vision_model.", "vision_tower.", "multi_modal_projector.")


class TowerShape(msgspec.Struct, frozen=True):
    """`vision_config` of a SigLIP tower; defaults are those of transformers."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.num_heads = shape.num_attention_heads
        self.scale = (width // self.num_heads) ** -0.5
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.activation_fn = _ACTS[shape.hidden_act]
        self.fc1 = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.fc2 = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class _Block(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.hidden_size, shape.layer_norm_eps)
        self.self_attn = _Attention(shape)
        self.layer_norm2 = nn.LayerNorm(shape.hidden_size, shape.layer_norm_eps)
        self.mlp = _FeedForward(shape)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states + self.self_attn(self.layer_norm1(hidden_states))
        return rows + self.mlp(self.layer_norm2(rows))


class _Tower(nn.Module):
    """Patch embedding, `num_layers` blocks and the projector."""

    def __init__(self, shape: TowerShape, num_layers: int, width: int, *, bias: bool) -> None:
        super().__init__()
        size = shape.patch_size
        self.patch_embedding = nn.Conv2d(shape.num_channels, shape.hidden_size, size, size)
        self.position_embedding = nn.Embedding(shape.num_patches, shape.hidden_size)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(num_layers))
        self.linear_1 = nn.Linear(shape.hidden_size, width, bias=bias)
        self.linear_2 = nn.Linear(width, width, bias=bias)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return (N, P, D), D of the language model."""
        rows = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        rows += self.position_embedding.weight
        for block in self.layers:
            rows = block(rows)
        return self.linear_2(F.gelu(self.linear_1(rows)))


class LlavaEncoder:
    """Implements `MediaEncoder`; weights are loaded with the first image.

    Args:
        model_dir: Directory of the checkpoint.
        dtype: dtype of the model.
        native: Native kernels compute the blocks.

    Raises:
        ConfigError: A tensor is missing, or has another shape.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, *, native: bool) -> None:
        config = read_json(model_dir / "config.json")
        self._shape = _shape_of(config)
        with torch.device("meta"):
            self._tower = _Tower(
                self._shape,
                _num_layers(config, self._shape),
                int(config["text_config"]["hidden_size"]),
                bias=bool(config.get("multimodal_projector_bias", True)),
            )
        self._tower.eval().requires_grad_(requires_grad=False)
        self._checkpoint = Checkpoint(model_dir)
        self._names = _names(self._checkpoint, self._tower)
        self._dtype, self._native, self._loaded = dtype, native, False

    @staticmethod
    def fits(model_dir: Path) -> bool:
        """Whether a checkpoint has such an encoder, and nothing else."""
        config = read_json(model_dir / "config.json")
        vision = config.get("vision_config") or {}
        layer = config.get("vision_feature_layer", -2)
        return (
            config.get("model_type") == "llava"
            and vision.get("model_type") == "siglip_vision_model"
            and config.get("vision_feature_select_strategy") == "full"
            and config.get("projector_hidden_act", "gelu") == "gelu"
            and vision.get("hidden_act", "gelu_pytorch_tanh") in _ACTS
            and isinstance(layer, int)
            and "hidden_size" in (config.get("text_config") or {})
            and any(model_dir.glob("*.safetensors"))
        )

    def encode(self, kind: MediaKind, features: Mapping[str, np.ndarray]) -> Sequence[torch.Tensor]:
        if kind != "image":
            raise ValueError(f"LLaVA encodes no {kind}")
        pixels = torch.from_numpy(np.ascontiguousarray(features["pixel_values"])).to(self._dtype)
        side = self._shape.image_size
        if pixels.shape[1:] != (self._shape.num_channels, side, side):
            raise ValueError(f"pixel_values must be (N, 3, {side}, {side})")
        if not self._loaded:
            self._load()
        return [self._tower(pixels).flatten(0, 1)]

    def _load(self) -> None:
        self._tower.load_state_dict(
            {
                own: self._checkpoint.tensor(name).to(self._dtype, copy=True)
                for own, name in self._names.items()
            },
            assign=True,
        )
        self._tower.requires_grad_(requires_grad=False)
        if self._native:
            use_native_blocks(self._tower, self._dtype, torch.get_num_threads())
        self._loaded = True


def _shape_of(config: Mapping[str, Any]) -> TowerShape:
    try:
        return msgspec.convert(config["vision_config"], TowerShape, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: vision_config: {error}") from None


def _num_layers(config: Mapping[str, Any], shape: TowerShape) -> int:
    """Number of used blocks; `vision_feature_layer` counts outputs from the embeddings on."""
    layer, count = int(config.get("vision_feature_layer", -2)), shape.num_hidden_layers
    used = layer + count + 1 if layer < 0 else layer
    if not 0 <= used <= count:
        raise ConfigError(f"config.json: vision_feature_layer {layer} of {count} layers")
    return used


def _names(checkpoint: Checkpoint, tower: nn.Module) -> dict[str, str]:
    """Map the tower's tensor names to those in the checkpoint."""
    known: dict[str, str] = {}
    for name in checkpoint.tensors:
        inner = next((name.partition(part)[2] for part in _PREFIXES if part in name), "")
        known[inner.removeprefix("embeddings.").removeprefix("encoder.")] = name
    found: dict[str, str] = {}
    for own, like in tower.state_dict().items():
        if own not in known:
            raise ConfigError(f"the checkpoint has no {own} of its encoder")
        shape = tuple(checkpoint.tensors[known[own]].shape)
        if shape != tuple(like.shape):
            raise ConfigError(f"{known[own]} has shape {shape}, not {tuple(like.shape)}")
        found[own] = known[own]
    return found
