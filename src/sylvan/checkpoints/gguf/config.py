"""Derives config.json from the metadata and tensors of a GGUF file.

Keys: ggml's docs/gguf.md. Fields of single families are in `families`.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

from sylvan.checkpoints.gguf.families import FAMILIES, family_of
from sylvan.checkpoints.gguf.family import GgufFamily
from sylvan.checkpoints.gguf.header import Header
from sylvan.checkpoints.gguf.keys import Keys
from sylvan.protocol.errors import ConfigError

_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
_EPSILONS = {
    "starcoder2": "norm_epsilon",
    "stablelm": "layer_norm_eps",
    "nemotron": "norm_eps",
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "phi": "layer_norm_eps",
}
"""Field for the epsilon in config.json, if not `rms_norm_eps`."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONTROL = 3
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        "<end_of_utterance>",
    )
)
"""Control tokens at which llama.cpp stops."""
_HARMONY = frozenset({"<|return|>", "<|call|>"})
_ROPES = frozenset({"none", "linear", "yarn"})


def config_json(header: Header) -> dict[str, Any]:
    """The config of the model in a file.

    Raises:
        ConfigError: The architecture is not supported as GGUF, or metadata is missing; names it.
    """
    keys = Keys(header)
    _check(keys)
    family = family_of(keys)
    epsilon = "attention.layer_norm_epsilon" if family.layer_norm else _RMS_EPSILON
    heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    head_dim = keys.number("attention.key_length", hidden // heads if heads else 0)
    if family.latent:
        head_dim = keys.number("rope.dimension_count")
    there = header.tensors
    return {
        "architectures": [family.name],
        "model_type": family.model_type,
        "vocab_size": there["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": served_layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(keys, heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.number("context_length"),
        _EPSILONS.get(family.model_type, "rms_norm_eps"): keys.number(epsilon, 1e-5),
        "tie_word_embeddings": "output.weight" not in there,
        "attention_bias": "blk.0.attn_q.bias" in there,
        "mlp_bias": "blk.0.ffn_gate.bias" in there,
        "hidden_act": "silu",
        "torch_dtype": _dtype(header),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(header),
        **_rope(keys, head_dim, family),
        **family.config(keys),
    }


def served_layers(keys: Keys) -> int:
    """Number of layers without the multi-token prediction layers, which are not read."""
    return keys.number("block_count") - keys.number("nextn_predict_layers", 0)


def _kv_heads(keys: Keys, heads: int) -> int:
    """Key heads of attention layers; files of hybrids list 0 for other layers."""
    found = keys.value("attention.head_count_kv")
    if isinstance(found, list) and len(counts := {n for n in found if n}) == 1:
        return counts.pop()
    return keys.number("attention.head_count_kv", heads)


def _ends(header: Header) -> list[Any]:
    """Tokens that end a text, turn or message: those in metadata, and those known by their text.

    Many files name only one of them.
    """
    names = [f"tokenizer.ggml.{what}_token_id" for what in ("eos", "eot", "eom")]
    found = [header.metadata[n] for n in names if n in header.metadata]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds):
        control = {text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL}
        ends = _ENDS & control
        if control >= _HARMONY:  # Harmony: it ends a part of a message, not the message
            ends = ends - {"<|end|>"}
        found += [i for i, text in enumerate(tokens) if text in ends]
    return list(dict.fromkeys(found))


def _check(keys: Keys) -> None:
    file = str(keys.header.file)
    if keys.architecture not in FAMILIES:
        raise ConfigError(
            f"{file!r} is of the architecture {keys.architecture!r}; from GGUF files "
            f"{', '.join(FAMILIES)} are served, others from their Hugging Face checkpoint"
        )
    if keys.number("expert_count", 0) and not family_of(keys).experts:
        raise ConfigError(
            f"{file!r} is a mixture of experts, which is not read from GGUF files of the "
            f"architecture {keys.architecture!r}"
        )
    if "token_embd.weight" not in keys.header.tensors:
        raise ConfigError(f"{file!r} lacks the tensor 'token_embd.weight', so it holds no model")


def _dtype(header: Header) -> str:
    """Return the dtype of most matrix elements; bfloat16 if they are quantised."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.quant.name] += tensor.stop - tensor.start
    return _DTYPES.get(sizes.most_common(1)[0][0], "bfloat16")


def _rope(keys: Keys, head_dim: int, family: GgufFamily) -> dict[str, Any]:
    """Rotary settings, spelt as in transformers."""
    rotary_dim = keys.number("rope.dimension_count", head_dim) or head_dim
    if rotary_dim != head_dim and not family.partial:
        raise ConfigError(
            f"{str(keys.header.file)!r}: {keys.architecture}.rope.dimension_count is {rotary_dim}, "
            f"but heads have {head_dim} columns; such models are not supported in GGUF files"
        )
    found: dict[str, Any] = {"rope_theta": float(keys.number("rope.freq_base", 10000.0))}
    if family.partial:
        found["partial_rotary_factor"] = rotary_dim / head_dim
    if scaling := _scaling(keys, rotary_dim, family):
        found["rope_scaling"] = scaling | family.scaling(keys)
    return found


def _scaling(keys: Keys, head_dim: int, family: GgufFamily) -> dict[str, Any] | None:
    """RoPE scaling, with the keys as llama.cpp reads them.

    Files store Llama 3's frequencies as one factor each, which `longrope` with equal factors for
    short and long texts expresses. It also expresses `attn_factor`, which multiplies cosines and
    sines with any scaling.
    """
    file, kind = str(keys.header.file), keys.text("rope.scaling.type")
    factor = float(keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)))
    kind = kind or ("linear" if factor else "none")
    factors = _floats(keys.header, _FACTORS) if _FACTORS in keys.header.tensors else []
    if long := [name for name in _LONG_FACTORS if name in keys.header.tensors]:
        return _long(keys, long)
    if kind not in _ROPES or (factors and kind == "yarn"):
        also = f" beside {_FACTORS}" if factors else ""
        raise ConfigError(f"{file!r}: rope.scaling.type {kind!r}{also} is not known")
    _refuse(keys, "alpha", 0.0)
    if kind == "yarn":
        return _yarn(keys, family)
    factor = factor if kind == "linear" and factor else 1.0
    times = float(keys.number("rope.scaling.attn_factor", 1.0))
    if not factors and times == 1.0:
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    each = [factor * f for f in factors or [1.0] * (head_dim // 2)]
    return {
        "rope_type": "longrope",
        "short_factor": each,
        "long_factor": each,
        "original_max_position_embeddings": keys.number("context_length"),
        "attention_factor": times,
    }


def _long(keys: Keys, names: list[str]) -> dict[str, Any]:
    """LongRoPE: short and long factors; `attn_factor` multiplies cosines and sines."""
    if len(names) != len(_LONG_FACTORS):
        raise ConfigError(f"{str(keys.header.file)!r} has {names[0]} without its other factors")
    long, short = (_floats(keys.header, name) for name in _LONG_FACTORS)
    context = keys.number("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": keys.number(
            "rope.scaling.original_context_length", context
        ),
        "attention_factor": float(keys.number("rope.scaling.attn_factor", 1.0)),
    }


def _yarn(keys: Keys, family: GgufFamily) -> dict[str, Any]:
    """YaRN: `yarn_attn_factor` is the checkpoint's `attention_factor`; `attn_factor` multiplies it.

    With `yarn_log_multiplier`, scores are scaled instead of cosines and sines.
    """
    mscale = family.mscale * keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not mscale:
        _refuse(keys, "yarn_log_multiplier", 0.0)
    if keys.number("rope.scaling.yarn_ext_factor", -1.0) >= 0.0:  # negative: unset
        _refuse(keys, "yarn_ext_factor", 1.0)
    factor = float(keys.number("rope.scaling.factor"))
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    times = keys.number("rope.scaling.attn_factor", 1.0)
    times *= keys.number("rope.scaling.yarn_attn_factor", usual)
    context = keys.number("context_length")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.number(
            "rope.scaling.original_context_length", context
        ),
    }
    if mscale:
        _refuse(keys, "attn_factor", 1.0)
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    elif times != usual:
        found["attention_factor"] = times
    for name in ("beta_fast", "beta_slow"):
        if value := keys.number(f"rope.scaling.yarn_{name}", 0.0):
            found[name] = value
    return found


def _refuse(keys: Keys, name: str, usual: float) -> None:
    """Reject a positional setting that is not implemented.

    Raises:
        ConfigError: The number is not `usual`.
    """
    value = keys.number(f"rope.scaling.{name}", usual)
    if value != usual:
        raise ConfigError(
            f"{str(keys.header.file)!r}: {keys.architecture}.rope.scaling.{name} is {value}, but "
            f"only {usual} is served"
        )


def _floats(header: Header, name: str) -> list[float]:
    """Read a small float32 tensor.

    Raises:
        ConfigError: It has another dtype.
    """
    tensor = header.tensors[name]
    if tensor.quant.name != "F32":
        raise ConfigError(f"{str(header.file)!r}: {name} is stored as {tensor.quant.name}, not F32")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        data = stream.read(tensor.stop - tensor.start)
    return [float(x) for x in struct.unpack(f"<{len(data) // 4}f", data)]
