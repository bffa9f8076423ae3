"""Counts attention layers of a checkpoint, and sizes the state of its recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

_ATTENDING = frozenset({"attention", "full_attention", "sliding_attention"})
_RECURRENT = frozenset({"mamba", "linear_attention", "conv"})
_BOTH = frozenset({"hybrid", "hybrid_sliding"})
_FIRST_MAMBA = frozenset({"mamba", "falcon_mamba", "jamba", "zamba"})
_ONLY_RECURRENT = frozenset({"mamba", "mamba2", "falcon_mamba"})


def attending_and_state(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(layers with keys and values, numbers in the recurrent state of one request), of `layers`.

    For models with known recurrent layers; others return (all layers, 0). An upper bound if the
    config relies on defaults of transformers.
    """
    own = _OWN.get(str(config.get("model_type")))
    if own is not None:
        return own(config, layers)
    kinds = _kinds(config, layers)
    if kinds is None:
        return layers, 0
    attending = sum(kind in _ATTENDING | _BOTH for kind in kinds)
    numbers = {"conv": _conv(config), "linear_attention": _linear(config)}
    return attending, sum(
        numbers.get(kind) or _mamba(config) for kind in kinds if kind in _RECURRENT | _BOTH
    )


def _rwkv(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    width = _first(config, 1, "hidden_size")
    return 0, layers * (4 * width + 3 * _first(config, width, "attention_hidden_size"))


def _rwkv7(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    width = _first(config, 1, "hidden_size")
    return 0, layers * width * (4 + _first(config, 64, "head_dim"))


def _rwkv6(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    width = _first(config, 1, "hidden_size")
    return 0, layers * width * (4 + _first(config, 64, "head_size"))


def _xlstm(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    width, heads = _first(config, 1, "hidden_size"), _first(config, 8, "num_heads")
    keys, values = (
        int(width * float(config.get(name) or usual)) // heads
        for name, usual in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))
    )
    return 0, layers * heads * (keys * values + keys + 1)


def _griffin(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """RecurrentGemma."""
    width = _first(config, _first(config, 1, "hidden_size"), "lru_width")
    pattern = config.get("block_types") or ["recurrent", "recurrent", "attention"]
    attends = sum(pattern[i % len(pattern)] == "attention" for i in range(layers))
    return attends, (layers - attends) * width * (1 + _first(config, 4, "conv1d_width"))


def _lightning(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """MiniMax-Text-01 and M1."""
    kinds = config.get("attn_type_list") or config.get("layer_types") or ()
    attends = sum(kind in (1, "full_attention") for kind in kinds)
    heads = _first(config, 1, "num_attention_heads")
    size = _first(config, _first(config, heads, "hidden_size") // heads, "head_dim")
    return attends, (layers - attends) * heads * size * size


def _kimi(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Kimi Linear, whose sizes are nested or not."""
    nested = config.get("linear_attn_config")
    named: Mapping[str, Any] = cast("dict[str, Any]", nested) if isinstance(nested, dict) else {}
    kinds = config.get("layer_types")
    full = cast("Sequence[object]", named.get("full_attn_layers") or ())
    named_kinds = cast("list[object]", kinds) if isinstance(kinds, list) else None
    attends = len(full) if named_kinds is None else _count(named_kinds)
    heads = _first(named, _first(config, 32, "linear_num_heads"), "num_heads")
    size = _first(named, _first(config, 128, "linear_head_dim"), "head_dim")
    taps = _first(named, _first(config, 4, "linear_conv_kernel_dim"), "short_conv_kernel_size")
    return attends, (layers - attends) * heads * size * (size + 3 * taps)


def _count(kinds: Sequence[object]) -> int:
    return sum(kind == "full_attention" for kind in kinds)


_OWN: Mapping[str, Callable[[Mapping[str, Any], int], tuple[int, int]]] = MappingProxyType(
    {
        "kimi_linear": _kimi,
        "minimax": _lightning,
        "minimax_m1": _lightning,
        "minimax_text_01": _lightning,
        "recurrent_gemma": _griffin,
        "rwkv": _rwkv,
        "rwkv5": _rwkv6,
        "rwkv6": _rwkv6,
        "rwkv7": _rwkv7,
        "xlstm": _xlstm,
    }
)


def _kinds(config: Mapping[str, Any], layers: int) -> Sequence[str] | None:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    kind = config.get("model_type")
    names = [str(name) for name in cast("list[object]", kinds)] if isinstance(kinds, list) else []
    if set(names) & (_RECURRENT | _BOTH):
        return names
    if kind in _ONLY_RECURRENT or kind == "falcon_h1":
        return ["hybrid" if kind == "falcon_h1" else "mamba"] * layers
    if kind == "zamba":
        return _zamba(config, layers)
    attends: list[int] | None = None
    if kind == "jamba":
        period, offset = _first(config, 8, "attn_layer_period"), config.get("attn_layer_offset", 4)
        attends = [i for i in range(layers) if i % period == offset]
    if kind == "bamba":
        attends = list(config.get("attn_layer_indices") or ())
    if attends is None:
        return None
    return ["attention" if i in attends else "mamba" for i in range(layers)]


def _zamba(config: Mapping[str, Any], layers: int) -> list[str]:
    """The third layer is hybrid, and those that a period and an offset choose of the later ones."""
    period, offset = _first(config, 6, "attn_layer_period"), config.get("attn_layer_offset", 4)
    later = ("hybrid" if i % period == offset else "mamba" for i in range(layers - 3))
    return ["mamba", "mamba", "hybrid", *later]


def _mamba(config: Mapping[str, Any]) -> int:
    kernel = _first(config, 4, "mamba_d_conv", "conv_kernel", "mamba_conv_kernel", "d_conv")
    states = _first(config, 128, "mamba_d_state", "ssm_state_size", "state_size")
    hidden = _first(config, 1, "hidden_size")
    inner = _first(config, 2, "mamba_expand", "expand") * hidden
    if config.get("model_type") in _FIRST_MAMBA:
        return inner * (states + kernel)
    heads = _first(config, 128, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    inner = heads * _first(
        config, 64, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"
    )
    groups = _first(config, 8, "mamba_n_groups", "n_groups", "mamba_ngroups")
    return inner * states + (inner + 2 * groups * states) * kernel


def _linear(config: Mapping[str, Any]) -> int:
    keys = _first(config, 0, "linear_key_head_dim")
    values = _first(config, 0, "linear_value_head_dim")
    heads = _first(config, 0, "linear_num_value_heads")
    if not (keys and values and heads):
        return 0
    kernel = _first(config, 4, "linear_conv_kernel_dim")
    wide = 2 * _first(config, heads, "linear_num_key_heads") * keys + heads * values
    return heads * keys * values + wide * kernel


def _conv(config: Mapping[str, Any]) -> int:
    return _first(config, 1, "hidden_size") * _first(config, 3, "conv_L_cache")


def _first(config: Mapping[str, Any], default: int, *names: str) -> int:
    found = (config.get(name) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), default)
