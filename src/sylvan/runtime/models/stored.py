"""Tensors as stored in files: the interface `WeightFiles`, and locations of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor: bytes [start, stop) of the data part of `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class WeightFiles(Protocol):
    """The weights of one model directory."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor; copy before writing to it."""
        ...
