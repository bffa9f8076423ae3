"""LLaDA 1: Llama with other tensor names, which generates the answer by block diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import (
    ModelConfig,
    block_diffusion,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import Decoder

Raw = dict[str, Any]

_FIXED = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "scale_logits": False,
    "input_emb_norm": False,
    "attention_layer_norm": False,
    "multi_query_attention": None,
}
"""Settings that all published checkpoints share, and that this file assumes."""


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `LLaDAModelLM`.

    Raises:
        ConfigError: a switch is set as in no published checkpoint.
    """
    for name, default in _FIXED.items():
        if raw.get(name, default) != default and raw[name]:
            raise ConfigError(f"config.json: {name} {raw[name]!r}; only {default!r} is known")
    heads = raw.get("n_heads")
    sizes = {
        "hidden_size": raw.get("d_model"),
        "intermediate_size": raw.get("mlp_hidden_size"),
        "num_hidden_layers": raw.get("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("n_kv_heads") or heads,
        "max_position_embeddings": raw.get("max_sequence_length"),
        "vocab_size": raw.get("embedding_size") or raw.get("vocab_size"),
        "hidden_act": raw.get("activation_type", "silu"),
        "tie_word_embeddings": bool(raw.get("weight_tying", False)),
    }
    bias = bool(raw.get("include_bias", False))
    fields = {
        "qkv_bias": bool(raw.get("include_qkv_bias", False)) or bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
    }
    whole = raw | sizes
    filling = block_diffusion(whole, block=32, mask_id=126336, whole=True)
    return make_config(common_fields(whole) | fields | filling)


class Llada(Decoder):
    """Maps tensor names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("wte",),
        "layers": ("blocks",),
        "norm": ("ln_f",),
        "lm_head": ("ff_out",),
        "input_layernorm": ("attn_norm",),
        "post_attention_layernorm": ("ff_norm",),
        "self_attn": (),
        "mlp": (),
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("attn_out",),
        "gate_up_proj": ("ff_proj", "up_proj"),
        "down_proj": ("ff_out",),
    }


MODEL = Llada
