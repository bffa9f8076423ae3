"""Metadata of a GGUF file by key, with the types that are expected of it."""

from __future__ import annotations

from typing import Any

from sylvan.checkpoints.gguf.header import Header
from sylvan.protocol.errors import ConfigError


class Keys:
    """Metadata of one file, with the types that are expected of it."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture", ""))

    def number(self, key: str, default: float | None = None) -> Any:
        """The number at `ARCHITECTURE.key`.

        Raises:
            ConfigError: it is missing, or none, or differs from layer to layer.
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
        """Whatever is at `ARCHITECTURE.key`."""
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def text(self, key: str) -> str:
        """The text at `ARCHITECTURE.key`; "" if there is none."""
        return str(self.header.metadata.get(f"{self.architecture}.{key}") or "")

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name, or one that ends so in a layer."""
        there = self.header.tensors
        return tensor in there or any(name.endswith("." + tensor) for name in there)
