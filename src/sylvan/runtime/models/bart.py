"""Standalone decoders of encoder-decoder families (`is_decoder`).

BART, mBART, Pegasus, Blenderbot, Marian, PLBart, MVP and TrOCR: OPT's tensors, with pre-norms or
post-norms, and learned positions with a varying offset, or sinusoids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.norm import LayerNorm
from sylvan.runtime.models.config import (
    ModelConfig,
    NotNative,
    architecture_of,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import Decoder, PreNorm, Ropes
from sylvan.runtime.models.encoder import PostAdd
from sylvan.runtime.models.gpt2 import Names

Raw = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BartKind:
    """Differences between these decoders.

    Attributes:
        first_row: Row of position 0 in the position table; None: sinusoids.
        pre_norm: Whether norms precede each part, with a final norm.
        embed_norm: Norm of embeddings: of the sum with positions, of words only, or none.
    """

    first_row: int | None = 2
    pre_norm: bool = False
    embed_norm: str = "sum"


_BART = BartKind()
KINDS: Mapping[str, BartKind] = MappingProxyType(
    {
        "BartForCausalLM": _BART,
        "BlenderbotForCausalLM": BartKind(first_row=0, pre_norm=True, embed_norm=""),
        "BlenderbotSmallForCausalLM": BartKind(first_row=0, embed_norm="words"),
        "MBartForCausalLM": BartKind(pre_norm=True),
        "MarianForCausalLM": BartKind(first_row=None, embed_norm=""),
        "MvpForCausalLM": _BART,
        "PLBartForCausalLM": _BART,
        "PegasusForCausalLM": BartKind(first_row=None, pre_norm=True, embed_norm=""),
        "TrOCRForCausalLM": _BART,
    }
)


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any of `KINDS`.

    Raises:
        ConfigError: An option is not supported.
    """
    architecture = architecture_of(raw)
    if architecture == "TrOCRForCausalLM":
        if not raw.get("use_learned_position_embeddings", True):
            raise NotNative("sinusoidal positions (use_learned_position_embeddings)")
        if not raw.get("layernorm_embedding", True):
            raise NotNative("embeddings without a norm (layernorm_embedding)")
    if raw.get("use_prompt"):
        raise NotNative("learned prefixes of attention (use_prompt)")
    width, heads = raw.get("d_model") or raw.get("hidden_size") or 0, raw["decoder_attention_heads"]
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": raw.get("decoder_layers"),
        "intermediate_size": raw.get("decoder_ffn_dim"),
        "hidden_act": raw.get("activation_function", "gelu"),
    }
    scaled = bool(raw.get("scale_embedding", False))
    fields = {
        "norm": "layer",
        "rms_norm_eps": 1e-5,
        "gated_mlp": False,
        "learned_positions": True,
        "embed_scale": math.sqrt(width) if scaled else 1.0,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True),
    }
    return make_config(common_fields(raw | sizes) | fields)


class BartDecoder(Decoder):
    """Maps tensor names; omits what only encoder-decoder models have."""

    fused: ClassVar[Names] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("out_proj",),
        "input_layernorm": ("self_attn_layer_norm",),
        "embed_norm": ("layernorm_embedding",),
        "up_proj": ("fc1",),
        "down_proj": ("fc2",),
        "mlp": (),
        "norm": ("layer_norm",),
        "lm_head": ("lm_head",),
    }
    _AFTER: ClassVar[Names] = {
        "post_attention_layernorm": ("self_attn_layer_norm",),
        "post_feedforward_layernorm": ("final_layer_norm",),
    }
    _BEFORE: ClassVar[Names] = {"post_attention_layernorm": ("final_layer_norm",)}

    def __init__(self, config: ModelConfig, build: Build) -> None:
        self._kind = self.kind_of(config.architecture)
        super().__init__(config, build)
        names = self._BEFORE if self._kind.pre_norm else self._AFTER
        self.fused = {**type(self).fused, **names}  # pyright: ignore[reportAttributeAccessIssue]
        self.embed_norm = None
        if self._kind.embed_norm:
            self.embed_norm = LayerNorm(build, config.hidden_size, config.rms_norm_eps)
        if not self._kind.pre_norm:
            del self.norm
        if self._kind.first_row is None:
            assert self.embed_positions is not None
            rows, dim = self.embed_positions.weight.shape
            del self.embed_positions.weight
            self.embed_positions.weight = self.sinusoids(rows, dim).to(build.device, build.dtype)

    def kind_of(self, architecture: str) -> BartKind:
        """How the decoder of an architecture is built."""
        return KINDS[architecture]

    def sinusoids(self, rows: int, dim: int) -> torch.Tensor:
        """Sinusoidal positions: sines, then cosines. Shape: (rows, dim)."""
        speed = 10_000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(rows, dtype=torch.float64)[:, None] * speed
        return torch.cat((angle.sin(), angle.cos()[:, : dim // 2]), 1).float()

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return (PreNorm if self._kind.pre_norm else PostAdd)(config, build, layer, ropes)

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of the encoder, and of tables that the config implies."""
        tables = ("embed_positions.",) if self._kind.first_row is None else ()
        layers = range(self.config.num_hidden_layers)
        across = (f"layers.{layer}.encoder_attn" for layer in layers)
        return ("encoder.", "shared.", "final_logits_bias", *tables, *across, *super().unused)

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name of the checkpoint."""
        name = name.removeprefix("trocr.").removeprefix("model.").removeprefix("decoder.")
        return name.replace("output_projection.", "lm_head.")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Drop the rows before position 0."""
        first = self._kind.first_row
        return tensor[first:] if name == "embed_positions.weight" and first else tensor

    def embed(self, batch: ForwardBatch) -> X:
        assert self.embed_positions is not None
        x_TD = self.embed_tokens(batch.input_ids_T)
        if self._kind.embed_norm == "words" and self.embed_norm is not None:
            x_TD, _ = self.embed_norm(x_TD)
        x_TD = ops.add(x_TD, self.embed_positions(batch.positions_T))
        if self._kind.embed_norm == "sum" and self.embed_norm is not None:
            x_TD, _ = self.embed_norm(x_TD)
        return x_TD

    @property
    def has_one_stream(self) -> bool:
        """See `Decoder.has_one_stream`."""
        return True

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        if self._kind.pre_norm:
            return super().forward(x_TD, batch)
        residual_TD = None
        for block in self.layers:
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
        return x_TD


MODEL = BartDecoder
