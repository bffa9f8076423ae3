"""Supported tasks of a checkpoint, by its architecture: generate text, or embed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

ENCODERS = frozenset(
    {
        *("Bert", "Camembert", "Contriever", "Data2VecText", "DistilBert", "Electra", "Ernie"),
        *("Gte", "HF_ColBERT", "ModernBert", "NomicBert", "Roberta", "Siglip", "Siglip2"),
        *("Siglip2Text", "SiglipText", "XLMRoberta"),
    }
)
"""Prefixes of architectures with bidirectional attention."""

_BIDIRECTIONAL = frozenset({"EuroBertModel", "LlamaBidirectionalModel"})
_AFTER_PADDING = frozenset(
    {
        *("Camembert", "Data2VecText", "Roberta", "RobertaPreLayerNorm", "XLMRoberta"),
        "XLMRobertaXL",
    }
)
_WITH_HEAD = ("LMHeadModel", "ChatModel", "ChatGLMModel", "DreamModel", "MTModel")
_SCORES = (
    *("ForSequenceClassification", "ForClassification", "ForProcessRewardModel"),
    *("ForRewardModel", "ForSequenceClassificationWithNormal_Weights"),
)
_BARE = ("Model", "ModelWithProjection")
_ENDS = (*_SCORES, "ForMaskedLM", "ForPreTraining", "Model")
_DISTIL = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}

GENERATING = ("generate", "embed", "both")


def tasks_of(config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Tasks of a checkpoint, its main one first.

    Sentence-transformers' modules.json marks a generative model as an embedder.
    """
    architecture = _architecture(config)
    if architecture.endswith(_SCORES):
        return ("classify",)
    bare = architecture.endswith(_BARE) and not architecture.endswith(_WITH_HEAD)
    if _stem(architecture) in ENCODERS or bare or architecture.endswith("ForRetrieval"):
        return ("embed",)
    if (folder / "modules.json").is_file():
        return ("embed", "generate", "both")
    return GENERATING


def is_causal(config: dict[str, Any]) -> bool:
    """Whether attention is causal."""
    architecture = _architecture(config)
    if _stem(architecture) in ENCODERS or architecture in _BIDIRECTIONAL:
        return False
    if architecture.endswith(("Model", *_SCORES)):
        said = config.get("is_causal") is False
        return not said and config.get("use_bidirectional_attention") is not True
    return True


_BOTH_HALVES = {  # the decoder's
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}
_SPELT = {
    "DistilBert": _DISTIL,
    "Whisper": {  # of the decoder
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
        "intermediate_size": "decoder_ffn_dim",
        "max_position_embeddings": "max_target_positions",
    },
    **dict.fromkeys(
        (
            *("Bart", "Blenderbot", "M2M100", "MBart", "Marian", "Mvp", "PLBart", "Pegasus"),
            "TrOCR",
        ),
        _BOTH_HALVES,
    ),
    "ChatGLM": {
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "seq_length",
    },
    "QWen": {"head_dim": "kv_channels"},
    "LLaDAModel": {
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "max_sequence_length",
        "vocab_size": "embedding_size",
    },
    "Phi3Small": {"intermediate_size": "ff_intermediate_size"},
    "Step3p5": {"num_key_value_heads": "num_attention_groups"},
    "ZambaFor": {"head_dim": "attention_head_dim"},
}
"""Other names of sizes in families, by prefix of their architectures."""


def _searched(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of Nemotron NAS or DeciLM: key heads of the layer with most, which all layers store."""
    heads = config.get("num_attention_heads")
    groups = [n for n in _entries(config.get("num_key_value_heads_per_layer")) if _counts(n)]
    if not groups and isinstance(heads, int):
        parts = (_inside(block, "attention") for block in _entries(config.get("block_configs")))
        sizes = (_inside(part, "n_heads_in_group") for part in parts)
        groups = [heads // size for size in sizes if _counts(size)]
    return {"num_key_value_heads": max(groups)} if groups else {}


def _entries(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _inside(value: Any, name: str) -> Any:
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None


def _counts(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _dbrx(config: dict[str, Any]) -> dict[str, Any]:
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    }
    inside = {
        "num_key_value_heads": _inside(config.get("attn_config"), "kv_n_heads"),
        "intermediate_size": _inside(config.get("ffn_config"), "ffn_hidden_size"),
    }
    found = {ours: config[theirs] for ours, theirs in names.items() if theirs in config}
    return found | {name: value for name, value in inside.items() if value is not None}


def _longcat(config: dict[str, Any]) -> dict[str, Any]:
    """Double the layers, because each attends twice."""
    layers = config.get("num_layers")
    rounds = {"num_hidden_layers": 2 * layers} if isinstance(layers, int) else {}
    inner = config.get("ffn_hidden_size")
    return rounds | ({} if inner is None else {"intermediate_size": inner})


def _mimo_v2(config: dict[str, Any]) -> dict[str, Any]:
    """Key heads of window layers, which have twice as many; pages have the same width in all."""
    heads = config.get("num_key_value_heads")
    return {"num_key_value_heads": 2 * heads} if isinstance(heads, int) else {}


def _widest(config: dict[str, Any]) -> dict[str, Any]:
    """Columns of the mlp by layer, if they differ (Gemma 3n)."""
    columns = [n for n in _entries(config.get("intermediate_size")) if _counts(n)]
    return {"intermediate_size": max(columns)} if columns else {}


def _xlstm(config: dict[str, Any]) -> dict[str, Any]:
    """Context length of training, because the architecture itself has no limit."""
    return {"max_position_embeddings": config.get("max_position_embeddings") or 8192}


def _rwkv(config: dict[str, Any]) -> dict[str, Any]:
    """Context length of training, because the architecture itself has no limit."""
    given = config.get("max_position_embeddings") or config.get("max_context_length")
    return {"max_position_embeddings": given or 4096}


def _t5(config: dict[str, Any]) -> dict[str, Any]:
    """Context length of the decoder: the trained one, because positions are distances."""
    names = {"head_dim": "d_kv", "intermediate_size": "d_ff", "num_attention_heads": "num_heads"}
    found = {ours: config[theirs] for ours, theirs in names.items() if theirs in config}
    layers = config.get("num_decoder_layers") or config.get("num_layers")
    positions = config.get("n_positions") or 512
    return found | {"num_hidden_layers": layers, "max_position_embeddings": positions}


_RENAMED_SIZES: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "Dbrx": _dbrx,
        "DeciLM": _searched,
        "LongcatFlash": _longcat,
        "MiMoV2Flash": _mimo_v2,
        **dict.fromkeys(("Rwkv5For", "Rwkv6For"), _rwkv),
        **dict.fromkeys(("T5For", "MT5For", "UMT5For"), _t5),
        "xLSTM": _xlstm,
    }
)


def ordinary(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the most common names of sizes, and positions that can be used."""
    config = config | _widest(config)
    stem = _stem(_architecture(config))
    for start, spelt in _SPELT.items():
        if stem.startswith(start):
            return config | {ours: config[old] for ours, old in spelt.items() if old in config}
    for start, rename in _RENAMED_SIZES.items():
        if stem.startswith(start):
            return config | rename(config)
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
