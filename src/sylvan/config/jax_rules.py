"""Impossible combinations with step programs on JAX."""

from __future__ import annotations

from sylvan.config.facts import ON_JAX
from sylvan.config.rules import Rule

KEYS_ON_JAX = Rule(
    "8-bit KV on JAX",
    ("device", "cache.dtype"),
    lambda c: c.config.cache.dtype != "model" and c.config.device in ON_JAX,
    "{device}: pages of {cache.dtype} have no lowering to JAX; leave cache.dtype at model",
)
JAX_RULES: tuple[Rule, ...] = (
    KEYS_ON_JAX,
    Rule(
        "parallel.devices without JAX",
        ("parallel.devices", "device"),
        lambda c: c.config.parallel.devices > 1 and c.config.device not in ON_JAX,
        "{parallel.devices}: one process can share a model among devices only on JAX, not on "
        "{device}; use device=jax or tpu, or leave parallel.devices out",
    ),
    Rule(
        "devices that do not divide into groups",
        ("parallel.attention_dp", "parallel.devices", "device"),
        lambda c: (
            c.config.device in ON_JAX
            and c.config.parallel.devices % c.config.parallel.attention_groups != 0
        ),
        "{parallel.attention_dp}: {parallel.devices} on {device} do not divide into that many "
        "groups; choose a parallel.attention_dp that divides parallel.devices",
    ),
)
