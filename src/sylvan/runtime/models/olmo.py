"""OLMo 2 and 3 (norms after attention and mlp, over whole projections) and EXAONE 4 (per head)."""

from __future__ import annotations

from typing import Any

from torch import nn

from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config, sliding_windows
from sylvan.runtime.models.decoder import Decoder, PostNorm, Ropes


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of any model served here."""
    exaone = "Exaone" in str(raw.get("architectures"))
    every = raw.get("sliding_window_pattern") or 4
    layers = range(raw.get("num_hidden_layers") or 0)
    if raw.get("sliding_window") and not raw.get("layer_types"):
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]
        raw = raw | {"layer_types": kinds}
    windows = sliding_windows(raw, default_on=False)
    bias = bool(raw.get("attention_bias", False))
    # EXAONE 4 has no rotary positions in full-attention layers if others have a window.
    nope = tuple(i for i, window in enumerate(windows) if window is None) if exaone else ()
    fields = {
        "qk_norm": "head" if exaone else "whole",
        "layer_windows": windows,
        "nope_layers": nope,
        "qkv_bias": bias,
        "o_bias": bias,
    }
    return make_config(common_fields(raw) | fields)


class Olmo2ForCausalLM(Decoder):
    """A decoder of post-norm blocks."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return PostNorm(config, build, layer, ropes)


MODEL = Olmo2ForCausalLM
