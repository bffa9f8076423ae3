"""The first GPT: norms after attention and mlp, learned positions, and no norm at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.api import X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, NotNative, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder, Ropes
from sylvan.runtime.models.encoder import PostAdd

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `OpenAIGPTLMHeadModel`."""
    width = raw.get("n_embd") or 0
    act = raw.get("afn", "gelu")
    if act not in ("gelu", "relu"):
        raise NotNative(f"the activation {act!r} (afn)")
    sizes = {
        "hidden_size": width,
        "num_attention_heads": raw.get("n_head"),
        "num_hidden_layers": raw.get("n_layer"),
        "max_position_embeddings": raw.get("n_positions"),
        "intermediate_size": 4 * width,
        "hidden_act": {"gelu": "gelu_new"}.get(act, act),
    }
    fields = {
        "norm": "layer",
        "gated_mlp": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "learned_positions": True,
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }
    return make_config(common_fields(raw | sizes) | fields)


class OpenAIGPT(Decoder):
    """Maps tensor names; matrices are stored inputs first."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("tokens_embed",),
        "embed_positions": ("positions_embed",),
        "layers": ("h",),
        "self_attn": ("attn",),
        "qkv_proj": ("c_attn",),
        "o_proj": ("c_proj",),
        "post_attention_layernorm": ("ln_1",),
        "up_proj": ("c_fc",),
        "down_proj": ("c_proj",),
        "post_feedforward_layernorm": ("ln_2",),
    }

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        del self.norm

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return PostAdd(config, build, layer, ropes)

    @property
    def has_one_stream(self) -> bool:
        """See `Decoder.has_one_stream`."""
        return True

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        residual_TD = None
        for block in self.layers:
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
        return x_TD

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose matrices."""
        return tensor.T if ".c_" in name and tensor.dim() == 2 else tensor


MODEL = OpenAIGPT
