"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from sylvan.checkpoints.gguf.header import Header
from sylvan.protocol.errors import ConfigError


class Keys:
    """Typed access to the metadata of one file."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture", ""))

    def number(self, key: str, default: float | None = None) -> Any:
        """The number of `ARCHITECTURE.key`.

        Raises:
            ConfigError: It is missing, is not a number, or differs from layer to layer.
        """
        name = f"{self.architecture}.{key}"
        value = self.header.metadata.get(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            said = "there is none" if value is None else f"it is {str(value)[:60]}"
            raise ConfigError(f"{str(self.header.file)!r}: {name} must be one number, {said}")
        return value

    def value(self, key: str, default: object = None) -> object:
        """The value of `ARCHITECTURE.key`, of any type."""
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def text(self, key: str) -> str:
        """The text of `ARCHITECTURE.key`; "" if missing."""
        return str(self.header.metadata.get(f"{self.architecture}.{key}") or "")

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name, or a layer tensor with this suffix."""
        there = self.header.tensors
        return tensor in there or any(name.endswith("." + tensor) for name in there)
