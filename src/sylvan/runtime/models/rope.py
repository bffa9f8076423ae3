"""Rotary position rules: from a checkpoint's rope parameters to a table of cosines and sines.

Every rule results in (inverse frequencies, factor on cos and sin), so that one op serves them all.
Sources: linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN (arXiv:2309.00071), LongRoPE
(arXiv:2402.13753), Llama 3.1 as published with its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from sylvan.protocol.errors import ConfigError


class RopeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Rope parameters, with transformers 5's names.

    `partial_rotary_factor` of a head's columns are rotated. Rules ignore fields they do not use.
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Rotated columns of a head."""
        return int(head_dim * self.partial_rotary_factor)


def parse_rope(
    raw: dict[str, Any], max_positions: int, layers: str = "full_attention"
) -> RopeParams:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        raw: config.json as read.
        max_positions: Its `max_position_embeddings`.
        layers: Kind of layers, if parameters differ between kinds.

    Raises:
        ConfigError: an unknown rule, or a missing or invalid parameter.
    """
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: rope parameters must be an object, not {given!r:.100}")
    found = dict(given)
    if isinstance(found.get(layers), dict):
        found = dict(found[layers])
    for key in ("rope_theta", "partial_rotary_factor"):
        if raw.get(key) is not None:
            found.setdefault(key, raw[key])
    kind = found.get("rope_type") or found.pop("type", None) or "default"
    if not isinstance(kind, str):
        raise ConfigError(f"config.json: rope_type must be a name, not {kind!r:.100}")
    found["rope_type"] = _OTHER_NAMES.get(kind, kind)
    if raw.get("original_max_position_embeddings") is not None:
        found["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    elif found["rope_type"] in ("llama3", "yarn", "longrope"):
        found.setdefault("original_max_position_embeddings", max_positions)
    try:
        params = msgspec.convert(found, RopeParams, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: bad rope parameters: {error}") from None
    _check(params)
    return params


_OTHER_NAMES = {"deepseek_yarn": "yarn", "mrope": "default", "su": "longrope"}
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "stepped": ("original_max_position_embeddings",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _check(params: RopeParams) -> None:
    if params.rope_type not in _NEEDS:
        known = ", ".join(sorted(_NEEDS))
        raise ConfigError(
            f"config.json: unknown rope_type {params.rope_type!r}; supported are {known}"
        )
    for name in _NEEDS[params.rope_type]:
        if getattr(params, name) is None:
            raise ConfigError(
                f"config.json: rope_type {params.rope_type!r} needs the parameter {name!r}"
            )
    positive = (
        *("rope_theta", "partial_rotary_factor", "factor", "attention_factor"),
        "original_max_position_embeddings",
    )
    for name in positive:
        value = getattr(params, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"config.json: {name} of rope must be positive, it is {value}")
    if params.partial_rotary_factor > 1:
        raise ConfigError(
            f"config.json: partial_rotary_factor must be at most 1, it is "
            f"{params.partial_rotary_factor}"
        )


def rope_table(
    params: RopeParams, head_dim: int, max_positions: int, length: int | None = None
) -> torch.Tensor:
    """Cosines and sines of all positions up to the context length.

    Rules that depend on the length of the text (dynamic NTK, Qwen 1's, LongRoPE) use the maximum
    context length, because the KV of a token must not depend on what follows it.

    Args:
        params: The rule.
        head_dim: Columns of a head; `params.rotary_dim(head_dim)` of them are rotated.
        max_positions: `max_position_embeddings` of the checkpoint.
        length: Positions to tabulate; the default is `max_positions`.

    Returns:
        float32 (length, rotary_dim): rotary_dim / 2 cosines, then as many sines.
    """
    length = length or max_positions
    inv_freq, factor = inverse_frequencies(params, head_dim, max_positions, length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)


def inverse_frequencies(
    params: RopeParams, head_dim: int, max_positions: int, length: int
) -> tuple[torch.Tensor, float]:
    """Angle per position of each column pair, and the factor on cos and sin.

    Shape: float32 (rotary_dim / 2,).
    """
    dim = params.rotary_dim(head_dim)
    return _RULES[params.rope_type](params, dim, max_positions, length)


_Result = tuple[torch.Tensor, float]


def _powers(theta: float, dim: int) -> torch.Tensor:
    """Theta to the power of 0, 2/dim, 4/dim, ..."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(params: RopeParams, dim: int, max_positions: int, length: int) -> _Result:
    return 1.0 / _powers(params.rope_theta, dim), 1.0


def _linear(params: RopeParams, dim: int, max_positions: int, length: int) -> _Result:
    assert params.factor is not None
    return 1.0 / _powers(params.rope_theta, dim) / params.factor, 1.0


def _dynamic(params: RopeParams, dim: int, max_positions: int, length: int) -> _Result:
    assert params.factor is not None
    stretch = params.factor * max(length, max_positions) / max_positions - (params.factor - 1)
    return 1.0 / _powers(params.rope_theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _stepped(params: RopeParams, dim: int, max_positions: int, length: int) -> _Result:
    """Qwen 1's dynamic NTK: the base grows with the length in powers of two."""
    times = length / (params.original_max_position_embeddings or max_positions)
    stretch = max(2 ** math.ceil(math.log2(times) + 1) - 1, 1)
    return 1.0 / _powers(params.rope_theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(params: RopeParams, dim: int, max_positions: int, length: int) -> _Result:
    original = params.original_max_position_embeddings or max_positions
    factor = params.factor or max_positions / original

    def column(rotations: float) -> float:
        """The column pair with this many rotations over the original context."""
        return (
            dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(params.rope_theta))
        )

    low, high = column(params.beta_fast or 32), column(params.beta_slow or 1)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(params.rope_theta, dim)
    inv_freq = 1.0 / (factor * powers) * ramp + 1.0 / powers * (1 - ramp)
    if params.attention_factor is not None:
        return inv_freq, params.attention_factor
    if params.mscale and params.mscale_all_dim:
        return inv_freq, _mscale(factor, params.mscale) / _mscale(factor, params.mscale_all_dim)
    return inv_freq, _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(params: RopeParams, dim: int, max_positions: int, length: int) -> _Result:
    assert params.short_factor is not None
    assert params.long_factor is not None
    original = params.original_max_position_embeddings or max_positions
    factors = params.long_factor if length > original else params.short_factor
    if len(factors) != dim // 2:
        raise ConfigError(
            f"config.json: longrope needs {dim // 2} factors, one a column pair; it has "
            f"{len(factors)}"
        )
    inv_freq = 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(params.rope_theta, dim))
    factor = params.factor or max_positions / original
    if params.attention_factor is not None:
        return inv_freq, params.attention_factor
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _llama3(params: RopeParams, dim: int, max_positions: int, length: int) -> _Result:
    assert params.factor is not None
    assert params.low_freq_factor is not None
    assert params.high_freq_factor is not None
    original = params.original_max_position_embeddings or max_positions
    inv_freq = 1.0 / _powers(params.rope_theta, dim)
    turns = original * inv_freq / (2 * math.pi)  # over the original context
    low, high = params.low_freq_factor, params.high_freq_factor
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / params.factor + smooth * inv_freq, 1.0


_RULES: dict[str, Callable[[RopeParams, int, int, int], _Result]] = {
    "default": _default,
    "stepped": _stepped,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
