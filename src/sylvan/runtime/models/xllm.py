"""K2 Horizon, and xLLM before it: Llama; larger models have experts with sigmoid routing.

If only a part of a head is rotated, it is the columns with the smallest angles of each half. They
are moved to the front of queries and keys, which does not change scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    attention_bias,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import FUSED, Decoder
from sylvan.runtime.models.moe import sparse_layers

Raw = dict[str, Any]

_UNKNOWN = (
    *("query_key_norm", "use_sliding_window", "sliding_window", "apply_attn_gate"),
    *("attention_gate_func", "attn_gate_func"),
)
_VALUES = ("mova_num_experts", "num_values")


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `K2HorizonForCausalLM` and `XllmForCausalLM`.

    Raises:
        ConfigError: It has value experts (MoVA), or options that belong to them.
    """
    if any(raw.get(name) for name in _VALUES):
        raise ConfigError("config.json: value experts (MoVA) are not supported")
    for name in _UNKNOWN:
        if raw.get(name):
            raise ConfigError(f"config.json: {name} {raw[name]!r} belongs to models with MoVA")
    if (raw.get("layernorm_num_groups") or 1) > 1:
        raise ConfigError("config.json: layernorm_num_groups must be 1")
    fields = common_fields(raw)
    head, part = fields.get("head_dim") or 1, raw.get("rope_head_dim")
    if isinstance(part, int) and 0 < part < head:
        fields = common_fields(raw | {"partial_rotary_factor": part / head})
    found = {"moe": _mixture(raw)} if raw.get("num_experts") else {}
    return make_config(fields | attention_bias(raw) | found)


def _mixture(raw: Raw) -> MoEConfig:
    kind, inner = raw.get("router_score_func", "sigmoid"), raw.get("moe_intermediate_size") or 0
    if kind not in ("sigmoid", "softmax"):
        raise ConfigError(f"config.json: unknown router_score_func {kind!r}")
    return MoEConfig(
        num_experts=raw["num_experts"],
        top_k=raw.get("num_experts_per_tok") or 1,
        inner=inner,
        scores=kind,
        normalise=bool(raw.get("norm_topk_prob", True)),
        scale=raw.get("router_scaling_factor") or 1.0,
        correction=bool(raw.get("moe_gate_bias", False)),
        layers=sparse_layers(raw),
        shared=inner * (raw.get("num_shared_experts") or 0),
    )


class Xllm(Decoder):
    """Moves rotated columns to the front of heads."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = FUSED

    def source_name(self, source: str) -> str:
        """Map names: the selection bias is stored as the router's bias."""
        return source.replace(".gate.e_score_correction_bias", ".gate.bias")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the columns of heads if only a part of them is rotated."""
        head = self.config.head_dim
        rotary = self.config.rope.rotary_dim(head)
        if rotary == head or not (".q_proj." in name or ".k_proj." in name):
            return tensor
        half, some = torch.arange(head // 2), rotary // 2
        first, second = half, half + head // 2
        order = torch.cat((first[:some], second[:some], first[some:], second[some:]))
        return tensor.unflatten(0, (-1, head))[:, order].flatten(0, 1)


MODEL = Xllm
