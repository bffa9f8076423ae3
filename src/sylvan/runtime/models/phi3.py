"""Phi-3 and Phi-4: Llama whose checkpoint joins query, key and value, and gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sylvan.runtime.models.config import ModelConfig, common_fields, make_config, sliding_windows
from sylvan.runtime.models.decoder import Decoder


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json; `original_max_position_embeddings` only counts for LongRoPE."""
    fields = common_fields(raw)
    return make_config(fields | {"layer_windows": sliding_windows(raw, default_on=True)})


class Phi3ForCausalLM(Decoder):
    """Checkpoints store joined matrices, so nothing is joined at load."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}


MODEL = Phi3ForCausalLM
