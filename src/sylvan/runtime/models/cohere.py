"""Cohere Command R: attention and mlp side by side from one layer norm without bias, scaled logits.

Command R7B (`Cohere2`) alternates layers with window and rotary positions, and layers without both.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    NotNative,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import Decoder, Parallel, Ropes


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of `CohereForCausalLM` and `Cohere2ForCausalLM`."""
    if raw.get("use_qk_norm"):
        raise NotNative("layer norms of heads (use_qk_norm)")
    second = "Cohere2ForCausalLM" in (raw.get("architectures") or ())
    every = raw.get("sliding_window_pattern") or 4
    layers = range(raw.get("num_hidden_layers") or 0)
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]
    raw = {"layer_types": kinds} | raw if second else raw
    windows = sliding_windows(raw, default_on=second) if second else ()
    bias = bool(raw.get("attention_bias", False))
    fields = {
        "norm": "layer",
        "norm_bias": False,
        "rms_norm_eps": raw.get("layer_norm_eps", 1e-5),
        "rope_interleaved": True,
        "logit_scale": raw.get("logit_scale", 0.0625),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "layer_windows": windows,
        "nope_layers": tuple(i for i, window in enumerate(windows) if window is None),
        "qkv_bias": bias,
        "o_bias": bias,
    }
    return make_config(common_fields(raw) | fields)


class CohereForCausalLM(Decoder):
    """A decoder of parallel blocks."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Parallel(config, build, layer, ropes)


MODEL = CohereForCausalLM
