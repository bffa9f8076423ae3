"""ChatGLM 2 and 3, and the first GLM-4: half of each head is rotated, in adjacent pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sylvan.runtime.models.config import ModelConfig, NotNative, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder

Raw = dict[str, Any]

_ORDINARY = (
    ("rmsnorm", True, "layer norms"),
    ("post_layer_norm", True, "no norm at the end"),
    ("apply_residual_connection_post_layernorm", False, "residuals after the norms"),
    ("pre_seq_len", None, "a learned prefix"),
)
"""Options that all published checkpoints set like this."""


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `ChatGLMModel` and `ChatGLMForConditionalGeneration`.

    Raises:
        ConfigError: An option is not supported, or it is the first ChatGLM.
    """
    for name, ordinary, what in _ORDINARY:
        if raw.get(name, ordinary) != ordinary:
            raise NotNative(f"{what} ({name})")
    if "ffn_hidden_size" not in raw:
        raise NotNative("the first ChatGLM's two-dimensional positions")
    heads = raw.get("num_attention_heads")
    groups = raw.get("multi_query_group_num") if raw.get("multi_query_attention") else heads
    bias = bool(raw.get("add_bias_linear", False))
    sizes = {
        "num_hidden_layers": raw.get("num_layers"),
        "intermediate_size": raw.get("ffn_hidden_size"),
        "vocab_size": raw.get("padded_vocab_size") or raw.get("vocab_size"),
        "head_dim": raw.get("kv_channels"),
        "num_key_value_heads": groups,
        "max_position_embeddings": raw.get("seq_length"),
        "rms_norm_eps": raw.get("layernorm_epsilon", 1e-5),
        "partial_rotary_factor": 0.5,
        "rope_theta": 10_000.0 * raw.get("rope_ratio", 1.0),
    }
    fields = {
        "rope_interleaved": True,
        "qkv_bias": bias or bool(raw.get("add_qkv_bias", False)),
        "o_bias": bias,
        "mlp_bias": bias,
    }
    return make_config(common_fields(raw | sizes) | fields)


class ChatGLMModel(Decoder):
    """Maps tensor names; projections are stored joined."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("word_embeddings",),
        "self_attn": ("self_attention",),
        "qkv_proj": ("query_key_value",),
        "o_proj": ("dense",),
        "gate_up_proj": ("dense_h_to_4h",),
        "down_proj": ("dense_4h_to_h",),
        "norm": ("final_layernorm",),
        "lm_head": ("output_layer",),
    }

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of tables that the config implies."""
        return (*super().unused, "rotary_pos_emb.")

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name of the checkpoint."""
        for prefix in ("transformer.", "encoder.", "embedding."):
            name = name.removeprefix(prefix)
        return name


MODEL = ChatGLMModel
