"""Number types of GGUF files; the package `gguf` has their layouts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

from sylvan.protocol.errors import ConfigError

READ = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Supported number types."""


@dataclass(frozen=True, slots=True)
class Quant:
    """A number type: `block` numbers take `num_bytes`."""

    name: str
    block: int
    num_bytes: int


@cache
def library() -> Any:
    """Import the package `gguf`.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConfigError("GGUF files need the package gguf: pip install 'sylvan[gguf]'") from None


def quant_of(number: int, where: str) -> Quant:
    """The type with this number.

    Raises:
        ConfigError: The type is unknown or unsupported; the message starts with `where`.
    """
    constants = library().constants
    try:
        kind = constants.GGMLQuantizationType(number)
    except ValueError:
        raise ConfigError(f"{where} is stored as an unknown type, number {number}") from None
    if kind.name not in READ:
        raise ConfigError(f"{where} is stored as {kind.name}; read are {', '.join(READ)}")
    block, num_bytes = constants.GGML_QUANT_SIZES[kind]
    return Quant(kind.name, int(block), int(num_bytes))
