"""Derives the contents of a GGUF file from a checkpoint: metadata, tensor names and order.

The inverse of `config` and `names`, for families whose files need no special keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sylvan.checkpoints.gguf.families import FAMILIES
from sylvan.checkpoints.gguf.family import GgufFamily
from sylvan.checkpoints.gguf.mixtures import MIXTRAL
from sylvan.checkpoints.gguf.names import INTERLEAVED, LAYER_NAMES, WHOLE_NAMES
from sylvan.protocol.errors import ConfigError

Raw = Mapping[str, Any]

_WRITTEN: Mapping[str, tuple[str, GgufFamily]] = MappingProxyType(
    {
        "llama": ("llama", FAMILIES["llama"]),
        "mistral": ("llama", FAMILIES["llama"]),
        "qwen2": ("qwen2", FAMILIES["qwen2"]),
        "qwen3": ("qwen3", FAMILIES["qwen3"]),
        "mixtral": ("llama", MIXTRAL),
        "qwen3_moe": ("qwen3moe", FAMILIES["qwen3moe"]),
    }
)
"""model_type -> llama.cpp's name of the architecture, and of its tensors."""
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)\Z")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file.

    Attributes:
        name: llama.cpp's name.
        layer: Layer of the tensor; -1: none.
        sources: Tensors of the checkpoint; several form a stack.
        interleaved_heads: Heads whose rows are interleaved for rotation; 0: rows keep their order.
    """

    name: str
    layer: int
    sources: tuple[str, ...]
    interleaved_heads: int = 0


@dataclass(frozen=True, slots=True)
class GgufExport:
    """The contents of a GGUF file.

    Attributes:
        architecture: llama.cpp's name.
        layers: Number of layers.
        values: Metadata by key, without the architecture prefix.
        frequencies: Divisors of rotary frequencies; empty: none.
        targets: All tensors.
        tied: Whether the head is the embedding.
    """

    architecture: str
    layers: int
    values: Mapping[str, int | float | str]
    frequencies: tuple[float, ...]
    targets: tuple[Target, ...]
    tied: bool


def exported(raw: Raw, names: Iterable[str]) -> GgufExport:
    """Describe the file of a checkpoint with this config.json and these tensors.

    Raises:
        ConfigError: The family cannot be written, or a field has no GGUF counterpart; names it.
    """
    kind = raw.get("model_type")
    if kind not in _WRITTEN:
        raise ConfigError(
            f"GGUF files of the family {kind!r} cannot be written; {', '.join(_WRITTEN)} can"
        )
    architecture, family = _WRITTEN[str(kind)]
    heads = _count(raw, "num_attention_heads")
    kv_heads = _count(raw, "num_key_value_heads", heads)
    head_dim = _count(raw, "head_dim", _count(raw, "hidden_size") // heads)
    _refuse_others(raw)
    scaling, frequencies = _scaling(raw, head_dim)
    theta = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    values: dict[str, int | float | str] = {
        "context_length": _count(raw, "max_position_embeddings"),
        "embedding_length": _count(raw, "hidden_size"),
        "block_count": _count(raw, "num_hidden_layers"),
        "feed_forward_length": _count(raw, "intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(raw.get("rms_norm_eps", 1e-6)),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(theta),
        "vocab_size": _count(raw, "vocab_size"),
        **scaling,
        **_experts(raw),
    }
    tied = bool(raw.get("tie_word_embeddings", False))
    targets = _targets(names, family, (heads, kv_heads), tied=tied)
    layers = _count(raw, "num_hidden_layers")
    return GgufExport(architecture, layers, values, frequencies, targets, tied)


def _count(raw: Raw, field: str, default: int | None = None) -> int:
    value = raw.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {field} is {value!r}; expected a positive number")
    return value


def _refuse_others(raw: Raw) -> None:
    """Reject fields that change the model but have no key in GGUF."""
    usual: Mapping[str, tuple[object, ...]] = {
        "hidden_act": ("silu", None),
        "use_sliding_window": (False, None),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
        "norm_topk_prob": (True, None),
        "pretraining_tp": (1, None),
    }
    if raw.get("use_sliding_window") is None and raw.get("sliding_window") is not None:
        window, longest = raw["sliding_window"], raw.get("max_position_embeddings", 0)
        if not isinstance(window, int) or window < longest:
            raise ConfigError(
                f"config.json: sliding_window is {window!r}, which GGUF files of this family "
                "cannot say"
            )
    for field, values in usual.items():
        if raw.get(field) not in values:
            raise ConfigError(
                f"config.json: {field} is {raw[field]!r}, which GGUF files of this family "
                "cannot say"
            )


def _experts(raw: Raw) -> dict[str, int | float | str]:
    field = next((name for name in ("num_experts", "num_local_experts") if name in raw), None)
    if field is None:
        return {}
    found: dict[str, int | float | str] = {
        "expert_count": _count(raw, field),
        "expert_used_count": _count(raw, "num_experts_per_tok"),
    }
    if "moe_intermediate_size" in raw:
        found["expert_feed_forward_length"] = _count(raw, "moe_intermediate_size")
    return found


def _scaling(raw: Raw, head_dim: int) -> tuple[dict[str, int | float | str], tuple[float, ...]]:
    """Metadata of RoPE scaling, or divisors of the frequencies."""
    rule = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rule.get("rope_type", rule.get("type", "default"))
    if kind == "default":
        return {}, ()
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rule["factor"])}, ()
    if kind == "llama3" and all(isinstance(rule.get(key), int | float) for key in _LLAMA3):
        return {}, _llama3(
            rule, float(raw.get("rope_theta") or rule.get("rope_theta") or 10000.0), head_dim
        )
    if kind == "yarn" and set(rule) <= {
        *("rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta"),
    }:
        original = rule.get("original_max_position_embeddings")
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rule["factor"]),
            "rope.scaling.original_context_length": int(original or raw["max_position_embeddings"]),
        }, ()
    raise ConfigError(f"config.json: rope_scaling {dict(rule)} cannot be written to GGUF files")


def _llama3(rule: Raw, theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's divisor of each frequency."""
    factor, low, high, original = (float(rule[key]) for key in _LLAMA3)
    found: list[float] = []
    for at in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (at / head_dim)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(found)


def _targets(
    names: Iterable[str], family: GgufFamily, heads: tuple[int, int], *, tied: bool
) -> tuple[Target, ...]:
    parts = {theirs: ours for ours, theirs in {**LAYER_NAMES, **family.names}.items()}
    whole = {theirs: ours for ours, theirs in {**WHOLE_NAMES, **family.whole}.items()}
    experts = [
        (re.compile(re.escape(theirs).replace(r"\{\}", r"(\d+)")), ours)
        for ours, theirs in family.experts.items()
    ]
    found: dict[str, Target] = {}
    stacks: dict[tuple[int, str], dict[int, str]] = {}
    for source in names:
        if source.endswith("rotary_emb.inv_freq") or (tied and source == "lm_head.weight"):
            continue
        match = _NAME.match(source)
        stem, _, end = source.rpartition(".")
        if match is None and stem in whole:
            name = f"{whole[stem]}.{end}"
            found[name] = Target(name, -1, (source,))
            continue
        layer, path, kind = match.groups() if match else ("-1", "", "")
        if path in parts:
            part = parts[path]
            interleaved_heads = (
                heads[part != "attn_q"] if family.pairs and part in INTERLEAVED else 0
            )
            name = f"blk.{layer}.{part}.{kind}"
            found[name] = Target(name, int(layer), (source,), interleaved_heads)
            continue
        expert = next(((m, ours) for p, ours in experts if (m := p.fullmatch(path))), None)
        if expert is None or kind != "weight":
            raise ConfigError(f"the tensor {source!r} has no place in GGUF files of this family")
        stacks.setdefault((int(layer), expert[1]), {})[int(expert[0][1])] = source
    for (layer, part), sources in stacks.items():
        if sorted(sources) != list(range(len(sources))):
            raise ConfigError(f"experts of layer {layer} are missing from {part}")
        name = f"blk.{layer}.{part}.weight"
        found[name] = Target(name, layer, tuple(sources[i] for i in range(len(sources))))
    return tuple(found.values())
