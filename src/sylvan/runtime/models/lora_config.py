"""`adapter_config.json` of PEFT: the fields that determine an adapter's meaning."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.malformed import MALFORMED
from sylvan.text.patterns.compile import PatternError
from sylvan.text.patterns.search import PatternSearch, automaton_of

MAX_PATTERNS = 4096
_MAX_AUTOMATA = 64
_MAX_SCALE = 3.4028234e38
"""Limit of scales, which are float32."""
_PLAIN = re.compile(r"[\w.\-/]*")


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `adapter_config.json` that determine an adapter's meaning."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    lora_bias: bool = False
    target_modules: list[str] | str | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    layer_replication: list[Any] | None = None

    def scale(self, module: str, rank: int) -> float:
        """Factor of the product of a module's matrices.

        Raises:
            ConfigError: the scale is out of range for float32.
        """
        patterns = self.alpha_pattern or {}
        found = (alpha for key, alpha in patterns.items() if _matcher(key)(module))
        alpha = next(found, self.lora_alpha)
        scale = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        if not abs(scale) <= _MAX_SCALE:
            raise ConfigError(
                f"lora_alpha {alpha:g} of {module!r} gives the scale {scale:g}, which exceeds "
                "float32"
            )
        return scale


def parse_config(data: bytes, where: str) -> AdapterConfig:
    """Parse a configuration; `where` is its name in errors.

    Raises:
        ConfigError: it is invalid, or of an unsupported adapter; names the field.
    """
    try:
        config = msgspec.json.decode(data, type=AdapterConfig)
    except MALFORMED as error:
        raise ConfigError(f"{where!r} is not an adapter configuration: {error}") from None
    lacking = ""
    if config.peft_type != "LORA":
        lacking = f"peft_type {config.peft_type}"
    elif config.bias != "none" or config.lora_bias:
        lacking = "trained biases (bias, lora_bias)"
    elif config.layer_replication:
        lacking = "layer_replication"
    if lacking:
        raise ConfigError(f"{where!r}: adapters with {lacking} cannot be used")
    if config.r < 1:
        raise ConfigError(f"{where!r}: r must be 1 or more, not {config.r}")
    _check_patterns(config.alpha_pattern or {}, where)
    return config


def _check_patterns(patterns: dict[str, float], where: str) -> None:
    real = [key for key in patterns if not _PLAIN.fullmatch(key)]
    if len(patterns) > MAX_PATTERNS or len(real) > _MAX_AUTOMATA:
        raise ConfigError(
            f"{where!r}: alpha_pattern has {len(patterns):,} entries; at most {MAX_PATTERNS:,}, "
            f"{_MAX_AUTOMATA} of them regular expressions"
        )
    for key in real:
        try:
            _matcher(key)
        except PatternError as error:
            raise ConfigError(f"{where!r}: alpha_pattern {key[:200]!r} {error}") from None


@functools.lru_cache(maxsize=MAX_PATTERNS)
def _matcher(key: str) -> Callable[[str], bool]:
    """Whether a key selects a module: by its name, or by its end after a dot.

    Expressions come from clients, so they run as automata in time linear in the name.
    """
    if _PLAIN.fullmatch(key):
        plain = re.compile(rf"(.*\.)?({key})")
        return lambda name: plain.fullmatch(name) is not None
    automaton = automaton_of(rf"\A(?:.*\.)?(?:{key})\Z")
    return lambda name: PatternSearch(automaton).push(name) is not None
