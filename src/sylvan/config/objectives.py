"""Bounds of latency that a good request keeps, as load tests and simulations are told them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sylvan.protocol.errors import ConfigError

Latency = Literal["ttft", "tpot", "e2e"]
"""To the first token, per output token after it, and to the end."""
Bounds = Mapping[Latency, float]
"""Seconds, by the latency that they bound."""
_NAMES = ("ttft", "tpot", "e2e")


def bounds(setting: str, given: Mapping[str, str]) -> Bounds:
    """Read milliseconds by name, such as `ttft=500,tpot=50`.

    Args:
        setting: Where they are given; errors name it.
        given: Its value.

    Raises:
        ConfigError: A name or number is wrong.
    """
    found: dict[Latency, float] = {}
    for name, text in given.items():
        try:
            bound_s = float(text) / 1000
        except ValueError:
            bound_s = -1.0
        if name not in _NAMES or not 0 < bound_s < float("inf"):
            known = ", ".join(_NAMES)
            raise ConfigError(f"{setting}: expected milliseconds for {known}, got {name}={text}")
        found[name] = bound_s
    return found
