"""What a checkpoint can do, by its architecture: continue texts, or turn them into vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENCODERS = frozenset(
    {
        *("Bert", "Camembert", "Data2VecText", "DistilBert", "Electra", "Ernie", "Gte"),
        *("ModernBert", "NomicBert", "Roberta", "XLMRoberta"),
    }
)
"""Starts of architectures whose tokens see each other both ways."""

_BOTH_WAYS = frozenset({"EuroBertModel", "LlamaBidirectionalModel"})
_AFTER_PADDING = frozenset(
    {
        *("Camembert", "Data2VecText", "Roberta", "RobertaPreLayerNorm", "XLMRoberta"),
        "XLMRobertaXL",
    }
)
_WITH_HEAD = ("LMHeadModel", "ChatModel", "ChatGLMModel")
_SCORES = ("ForSequenceClassification", "ForRewardModel")
_ENDS = (*_SCORES, "ForMaskedLM", "ForPreTraining", "Model")
_DISTIL = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}

GENERATING = ("generate", "embed", "both")


def tasks_of(config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """What can be chosen for a checkpoint, what it was published for first.

    Sentence-transformers' modules.json marks a model that generates as an embedder.
    """
    architecture = _architecture(config)
    if architecture.endswith(_SCORES):
        return ("classify",)
    bare = architecture.endswith("Model") and not architecture.endswith(_WITH_HEAD)
    if _stem(architecture) in ENCODERS or bare:
        return ("embed",)
    if (folder / "modules.json").is_file():
        return ("embed", "generate", "both")
    return GENERATING


def is_causal(config: dict[str, Any]) -> bool:
    """Whether tokens see only those before them."""
    architecture = _architecture(config)
    if _stem(architecture) in ENCODERS or architecture in _BOTH_WAYS:
        return False
    if architecture.endswith(("Model", *_SCORES)):
        said = config.get("is_causal") is False
        return not said and config.get("use_bidirectional_attention") is not True
    return True


_WHISPER = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
}
"""What writes, which other sizes of the same names are not of."""


def ordinary(config: dict[str, Any]) -> dict[str, Any]:
    """The config with sizes spelt as most do, and positions that can be used."""
    stem = _stem(_architecture(config))
    if stem == "DistilBert":
        return config | {ours: config[old] for ours, old in _DISTIL.items() if old in config}
    if stem.startswith("Whisper"):
        return config | {ours: config[old] for ours, old in _WHISPER.items() if old in config}
    positions = config.get("max_position_embeddings")
    if stem.removesuffix("ForCausalLM") in _AFTER_PADDING and isinstance(positions, int):
        used = int(config.get("pad_token_id") or 0) + 1
        return config | {"max_position_embeddings": positions - used}
    return config


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""  # pyright: ignore[reportUnknownArgumentType]


def _stem(architecture: str) -> str:
    for end in _ENDS:
        if architecture.endswith(end):
            return architecture.removesuffix(end)
    return architecture
