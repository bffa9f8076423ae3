"""Whisper: a decoder with cross-attention to encoded audio.

The encoder belongs to a capability (`features.multimodal`); the audio is an item of the prompt,
with the placeholder `<|startoftranscript|>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.api import X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.cross import CrossAttention, CrossShape
from sylvan.runtime.models.config import ModelConfig, ModelMedia, common_fields, make_config
from sylvan.runtime.models.decoder import Attention, Decoder, Ropes, make_mlp, make_norm

_NO_BIAS = "encoder.layer_norm.bias"


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json."""
    sizes = {
        "hidden_size": raw.get("d_model"),
        "intermediate_size": raw.get("decoder_ffn_dim"),
        "num_hidden_layers": raw.get("decoder_layers"),
        "num_attention_heads": raw.get("decoder_attention_heads"),
        "max_position_embeddings": raw.get("max_target_positions"),
        "hidden_act": raw.get("activation_function", "gelu"),
    }
    fields = common_fields(raw | sizes)
    start = raw.get("decoder_start_token_id")
    media = ModelMedia(
        architecture=fields["architecture"],
        token_ids={"audio": int(start or 50258)},
        cross=True,
        one=True,
    )
    scaled = raw.get("scale_embedding", False)
    return make_config(
        fields
        | {
            "norm": "layer",
            "rms_norm_eps": 1e-5,
            "gated_mlp": False,
            "learned_positions": True,
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "embed_scale": float(raw["d_model"]) ** 0.5 if scaled else 1.0,
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "media": media,
        }
    )


class WhisperBlock(nn.Module):
    """Self-attention, cross-attention to the audio, and feed-forward, with pre-norms."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.self_attn = Attention(config, build, layer, ropes)
        self.encoder_attn_layer_norm = make_norm(config, build)
        shape = CrossShape(
            dim=config.hidden_size,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
        )
        self.encoder_attn = CrossAttention(build, layer, shape)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD, stream_TD = self.encoder_attn_layer_norm(self.self_attn(h_TD, batch), stream_TD)
        h_TD = self.encoder_attn(h_TD, batch)
        h_TD, stream_TD = self.post_attention_layernorm(h_TD, stream_TD)
        return self.mlp(h_TD), stream_TD


class Whisper(Decoder):
    """Keys of its attention have no bias."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("out_proj",),
        "input_layernorm": ("self_attn_layer_norm",),
        "post_attention_layernorm": ("final_layer_norm",),
        "norm": ("layer_norm",),
        "up_proj": ("fc1",),
        "down_proj": ("fc2",),
        "mlp": (),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return WhisperBlock(config, build, layer, ropes)

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefix of the encoder, which is loaded separately."""
        return (*super().unused, "encoder.", "proj_out.")

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name of the checkpoint."""
        return name.removeprefix("model.").removeprefix("decoder.")

    def source_name(self, name: str) -> str:
        """Map a name: the missing bias of keys is read from another bias of the same size."""
        return _NO_BIAS if name.endswith(".self_attn.k_proj.bias") else name

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Use zeros for the missing bias."""
        return torch.zeros_like(tensor) if name == _NO_BIAS else tensor


MODEL = Whisper
