"""Qwen 1: Llama with joined projections, biases on queries, keys and values, and half-width mlps.

`intermediate_size` counts the columns of both halves of the mlp. Contexts beyond `seq_length` work
as the model card describes: a rotary base that grows in steps (`use_dynamic_ntk`), fixed here by
the context length, and queries scaled by the logarithm of the position (`use_logn_attn`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig, QueryScaling, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `QWenLMHeadModel`."""
    inner = raw.get("intermediate_size")
    if not isinstance(inner, int) or inner % 2:
        raise ConfigError(f"config.json: intermediate_size must be even, it is {inner!r}")
    trained = raw.get("seq_length") or raw.get("max_position_embeddings") or 2048
    rope = {
        "rope_type": "stepped" if raw.get("use_dynamic_ntk", True) else "default",
        "rope_theta": float(raw.get("rotary_emb_base", 10_000.0)),
        "partial_rotary_factor": float(raw.get("rotary_pct", 1.0)),
        "original_max_position_embeddings": trained,
    }
    sizes = {
        "intermediate_size": inner // 2,
        "head_dim": raw.get("kv_channels", 128),
        "rope_parameters": rope,
        "hidden_act": "silu",
    }
    fields = common_fields(raw | sizes)
    grows = bool(raw.get("use_logn_attn", True))
    found = {
        "num_key_value_heads": fields["num_attention_heads"],
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-6),
        "qkv_bias": True,
        "o_bias": not raw.get("no_bias", True),
        "mlp_bias": not raw.get("no_bias", True),
        "query_scaling": QueryScaling(every=trained, strength=0.0, log=True) if grows else None,
    }
    return make_config(fields | found)


class QWenLMHeadModel(Decoder):
    """The checkpoint's names; of the mlp's halves the second passes the activation."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("wte",),
        "layers": ("h",),
        "input_layernorm": ("ln_1",),
        "self_attn": ("attn",),
        "qkv_proj": ("c_attn",),
        "o_proj": ("c_proj",),
        "post_attention_layernorm": ("ln_2",),
        "gate_up_proj": ("w2", "w1"),
        "down_proj": ("c_proj",),
        "norm": ("ln_f",),
    }

    @property
    def unused(self) -> tuple[str, ...]:
        """A table that follows from the config."""
        return (*super().unused, "rotary_emb.", "visual.")


MODEL = QWenLMHeadModel
