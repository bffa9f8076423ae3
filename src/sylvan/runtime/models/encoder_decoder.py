"""Encoder-decoder models for translation and summarisation.

BART, mBART, Pegasus, Blenderbot, Marian, PLBart and MVP, as in `bart`, and M2M100 (NLLB). The
encoder is a capability's (`features.multimodal`), and the prompt is its item. Florence-2 is BART
whose encoder also reads images in the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import nn

from sylvan.kernels.api import X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.cross import CrossAttention, CrossShape
from sylvan.runtime.models import bart
from sylvan.runtime.models.bart import BartDecoder, BartKind
from sylvan.runtime.models.config import ModelConfig, ModelMedia, NotNative, architecture_of
from sylvan.runtime.models.decoder import Attention, Ropes, make_mlp, make_norm
from sylvan.runtime.models.encoder import PostAdd

Raw = dict[str, Any]

_ALONE: Mapping[str, str] = MappingProxyType(
    {
        "MarianMTModel": "MarianForCausalLM",
        **{
            f"{stem}ForConditionalGeneration": f"{stem}ForCausalLM"
            for stem in ("Bart", "Blenderbot", "BlenderbotSmall", "MBart", "Mvp", "PLBart")
        },
        "PegasusForConditionalGeneration": "PegasusForCausalLM",
    }
)
"""Architectures -> architectures of their standalone decoders, which are built alike."""

_FLORENCE = "Florence2ForConditionalGeneration"
_M2M100 = "M2M100ForConditionalGeneration"
_BIASED = "MarianMTModel"
"""Family with trained biases of logits; other families store zeros."""


def parse(raw: Raw) -> ModelConfig:
    """Read config.json.

    Raises:
        ConfigError: An option is not supported; there is no fallback.
    """
    architecture = architecture_of(raw)
    if architecture == _FLORENCE:
        return _florence(raw)
    alone = _ALONE.get(architecture, "PegasusForCausalLM")
    if not raw.get("share_encoder_decoder_embeddings", True):
        raise ConfigError(
            f"{architecture} cannot be served with an embedding table per encoder and decoder "
            "(share_encoder_decoder_embeddings)"
        )
    try:
        config = bart.parse(raw | {"architectures": [alone]})
    except NotNative as lack:
        raise ConfigError(f"{architecture} cannot be served with {lack}") from None
    return msgspec.structs.replace(
        config,
        architecture=architecture,
        head_bias=architecture == _BIASED,
        media=text_media(raw, architecture, config.max_position_embeddings),
    )


def _florence(raw: Raw) -> ModelConfig:
    text: Raw = raw.get("text_config") or {}
    if text.get("model_type", "bart") != "bart":
        raise ConfigError(f"{_FLORENCE} cannot be served with text_config {text['model_type']!r}")
    config = parse(text | {"architectures": ["BartForConditionalGeneration"]})
    assert config.media is not None, "BART encodes its prompt"
    media = msgspec.structs.replace(
        config.media,
        architecture=_FLORENCE,
        token_ids={"image": int(raw.get("image_token_id", 51289))},
    )
    return msgspec.structs.replace(config, media=media)


def text_media(raw: Raw, architecture: str, encoder_len: int = 0) -> ModelMedia:
    """The encoder of a model, and the decoder's first tokens according to config.json.

    Args:
        raw: config.json.
        architecture: The model's architecture.
        encoder_len: Maximum tokens of its encoder; 0: the same as the decoder.
    """
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    start = next((raw[name] for name in names if isinstance(raw.get(name), int)), 0)
    forced = raw.get("forced_bos_token_id")
    return ModelMedia(
        architecture=architecture,
        token_ids={},
        cross=True,
        one=True,
        decoder_prompt=(start, forced) if isinstance(forced, int) else (start,),
        encoder_len=encoder_len,
    )


class CrossPreNorm(nn.Module):
    """Self-attention, cross-attention and feed-forward, with pre-norms."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.self_attn = Attention(config, build, layer, ropes)
        self.encoder_attn_layer_norm = make_norm(config, build)
        self.encoder_attn = _cross(config, build, layer)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD, stream_TD = self.encoder_attn_layer_norm(self.self_attn(h_TD, batch), stream_TD)
        h_TD, stream_TD = self.post_attention_layernorm(self.encoder_attn(h_TD, batch), stream_TD)
        return self.mlp(h_TD), stream_TD


class CrossPostAdd(PostAdd):
    """Self-attention, cross-attention and feed-forward, with post-norms."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        self.encoder_attn = _cross(config, build, layer)
        self.encoder_attn_layer_norm = make_norm(config, build)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X | None]:
        x_TD, _ = self.post_attention_layernorm(self.self_attn(x_TD, batch), x_TD)
        x_TD, _ = self.encoder_attn_layer_norm(self.encoder_attn(x_TD, batch), x_TD)
        x_TD, _ = self.post_feedforward_layernorm(self.mlp(x_TD), x_TD)
        return x_TD, None


def _cross(config: ModelConfig, build: Build, layer: int) -> CrossAttention:
    shape = CrossShape(
        dim=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        key_bias=True,
    )
    return CrossAttention(build, layer, shape)


class Translator(BartDecoder):
    """The decoder, with the tables and the head that it shares with the encoder."""

    def kind_of(self, architecture: str) -> BartKind:
        """The kind of decoder; M2M100 has Pegasus' layers."""
        return bart.KINDS[_ALONE.get(architecture, "PegasusForCausalLM")]

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return (CrossPreNorm if self._kind.pre_norm else CrossPostAdd)(config, build, layer, ropes)

    def sinusoids(self, rows: int, dim: int) -> torch.Tensor:
        if self.config.architecture != _M2M100:
            return super().sinusoids(rows, dim)
        half = dim // 2
        speed = torch.exp(torch.arange(half).float() * -(math.log(10_000) / (half - 1)))
        pad = self.config.raw.get("pad_token_id")
        first = 2 if pad is None else pad + 1  # rows up to the padding id are unused
        angle = (torch.arange(rows).float() + first)[:, None] * speed
        return nn.functional.pad(torch.cat((angle.sin(), angle.cos()), 1), (0, dim % 2))

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of the encoder, loaded separately, and of copies of the shared table."""
        biases = () if self.config.head_bias else ("final_logits_bias",)
        tables = ("embed_positions.",) if self._kind.first_row is None else ()
        eyes = "vision_tower.", "multi_modal_projector."
        return ("encoder.", "decoder_table.", *eyes, *biases, *tables)

    def rename(self, name: str) -> str:
        """The shared table is the embedding; biases of logits belong to the head."""
        for prefix in ("model.", "language_model.", "model."):
            name = name.removeprefix(prefix)
        if name == "decoder.embed_tokens.weight":
            return "decoder_table.weight"
        if name == "final_logits_bias" and self.config.head_bias:
            return "lm_head.bias"
        return name.removeprefix("decoder.").replace("shared.", "embed_tokens.")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Drop the rows before position 0; flatten biases, which are stored as a row."""
        return tensor.flatten() if name == "lm_head.bias" else super().convert(name, tensor)


MODEL = Translator
