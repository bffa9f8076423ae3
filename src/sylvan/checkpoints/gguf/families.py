"""All supported GGUF architectures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sylvan.checkpoints.gguf.dense import DENSE, OLMO_3
from sylvan.checkpoints.gguf.family import GgufFamily
from sylvan.checkpoints.gguf.hybrids import HYBRIDS
from sylvan.checkpoints.gguf.keys import Keys
from sylvan.checkpoints.gguf.mixtures import MIXTRAL, MIXTURES

FAMILIES: Mapping[str, GgufFamily] = MappingProxyType({**DENSE, **MIXTURES, **HYBRIDS})
"""GGUF architecture -> description of its files."""


def family_of(keys: Keys) -> GgufFamily:
    """The family of a file; some families share the architecture name of another one."""
    if keys.architecture == "llama" and keys.number("expert_count", 0):
        return MIXTRAL
    if keys.architecture == "olmo2" and keys.number("attention.sliding_window", 0):
        return OLMO_3
    return FAMILIES[keys.architecture]
