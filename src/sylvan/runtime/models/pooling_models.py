"""Decoders without an LM head: embedding models, classifiers and reward models.

The generative family serves their layers (`Qwen3ForCausalLM` serves `Qwen3Model`); this module only
selects the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from sylvan.runtime.models.config import ModelConfig, architecture_of
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.heads import count_labels
from sylvan.runtime.models.registry import load_family

_CAUSAL: Mapping[str, str] = MappingProxyType(
    {
        "EuroBert": "LlamaForCausalLM",
        "Gemma3Text": "Gemma3ForCausalLM",
        "GPT2": "GPT2LMHeadModel",
        "LlamaBidirectional": "LlamaForCausalLM",
        "LlamaEmbedding": "LlamaForCausalLM",
    }
)
_BIDIRECTIONAL = ("EuroBert", "LlamaBidirectional")
_WEIGHED = "ForSequenceClassificationWithNormal_Weights"
_SUFFIXES = (
    *("ForSequenceClassification", "ForClassification", "ForProcessRewardModel"),
    *("ForRewardModel", "Model", _WEIGHED),
)


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of a decoder that does not generate."""
    architecture = architecture_of(raw)
    stem = next(s for x in _SUFFIXES if (s := architecture.removesuffix(x)) != architecture)
    causal = _CAUSAL.get(stem, f"{stem}ForCausalLM")
    config = load_family(causal).parse(raw | {"architectures": [causal]})
    return msgspec.structs.replace(
        config,
        raw=raw,
        causal=not (stem in _BIDIRECTIONAL or is_bidirectional(raw)),
        layer_windows=_windows(config, raw),
        tie_word_embeddings=False,
        **_head(architecture, raw),
    )


def is_bidirectional(raw: dict[str, Any]) -> bool:
    """Whether config.json declares bidirectional attention."""
    return raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True


def _windows(config: ModelConfig, raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Windows of each layer; Gemma's window size covers both directions together."""
    if raw.get("use_bidirectional_attention") is not True:
        return config.layer_windows
    return tuple(None if w is None else w // 2 + 1 for w in config.layer_windows)


def _head(architecture: str, raw: dict[str, Any]) -> dict[str, Any]:
    if architecture.endswith("Model") and not architecture.endswith("RewardModel"):
        return {"head": "none"}
    kind, labels = "score", count_labels(raw)
    if architecture == "InternLM2ForRewardModel":  # one matrix
        labels = 1
    elif architecture.endswith("ForClassification"):
        labels = raw.get("classification_out_size") or 1
    elif architecture.endswith(_WEIGHED):
        kind, labels = "weighted", 1
    elif architecture.endswith("RewardModel"):
        default = 2 if architecture.endswith("ForProcessRewardModel") else 1
        kind, labels = "reward", count_labels(raw, default=default)
    return {"head": kind, "num_labels": labels}


MODEL = Decoder  # unused: the config names the family whose class is used
