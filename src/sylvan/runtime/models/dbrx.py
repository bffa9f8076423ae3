"""DBRX: many experts behind a softmax, clipped projections, and norms without biases.

The checkpoint joins queries, keys and values, and stores the matrices of all experts below each
other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig, MoEConfig, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder

Raw = dict[str, Any]

_EPS = 1e-5  # of the norms; config.json does not say it
_STACKS = re.compile(r"(.*\.ffn\.experts)\.mlp\.(w1|v1|w2)")


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `DbrxForCausalLM`.

    Raises:
        ConfigError: a part is missing, or expert weights are normed as in no published model.
    """
    attention, ffn = (raw.get(name) for name in ("attn_config", "ffn_config"))
    if not isinstance(attention, dict) or not isinstance(ffn, dict):
        raise ConfigError("config.json: attn_config and ffn_config must be objects")
    power, layers = ffn.get("moe_normalize_expert_weights"), raw.get("n_layers") or 0
    if power not in (None, 1):
        raise ConfigError(
            f"config.json: moe_normalize_expert_weights must be 1 or null, it is {power!r}"
        )
    sizes = {
        "hidden_size": raw.get("d_model"),
        "num_hidden_layers": layers,
        "num_attention_heads": raw.get("n_heads"),
        "num_key_value_heads": attention.get("kv_n_heads", 1),
        "max_position_embeddings": raw.get("max_seq_len", 2048),
        "intermediate_size": ffn.get("ffn_hidden_size", 3584),
        "hidden_act": (ffn.get("ffn_act_fn") or {}).get("name", "silu"),
    }
    if "rope_parameters" not in raw:
        sizes["rope_theta"] = attention.get("rope_theta", 10_000.0)
    moe = MoEConfig(
        num_experts=ffn.get("moe_num_experts", 4),
        top_k=ffn.get("moe_top_k", 1),
        inner=sizes["intermediate_size"],
        normalise=power is not None,
        layers=tuple(range(layers)),
    )
    fields = {
        "moe": moe,
        "norm": "layer",
        "norm_bias": False,
        "rms_norm_eps": _EPS,
        "qkv_limit": float(attention.get("clip_qkv") or 0.0),
    }
    return make_config(common_fields(raw | sizes) | fields)


class Dbrx(Decoder):
    """Maps tensor names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("wte",),
        "layers": ("blocks",),
        "norm": ("norm_f",),
        "input_layernorm": ("norm_attn_norm.norm_1",),
        "post_attention_layernorm": ("norm_attn_norm.norm_2",),
        "self_attn": ("norm_attn_norm.attn",),
        "qkv_proj": ("Wqkv",),
        "o_proj": ("out_proj",),
        "mlp": ("ffn",),
        "gate": ("router.layer",),
        "gate_up_proj": ("w1", "v1"),
        "down_proj": ("w2",),
    }

    def parts_of(self, name: str) -> tuple[str, ...]:
        """The matrices of experts in a stored tensor."""
        found, moe = _STACKS.fullmatch(name), self.config.moe
        if found is None or moe is None:
            return ()
        stem, kind = found.groups()
        return tuple(f"{stem}.{expert}.{kind}.weight" for expert in range(moe.num_experts))

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The second matrix of an expert is stored inputs first."""
        return tensor.T if name.endswith(".w2.weight") else tensor


MODEL = Dbrx
