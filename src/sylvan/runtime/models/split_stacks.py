"""A view of weight files that splits stacked tensors into one tensor per matrix.

Some checkpoints store the matrices of all experts concatenated or stacked, but slots need one
tensor per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.stored import StoredTensor, WeightFiles


class SplitStacks:
    """Implements `WeightFiles` over other files, some of whose tensors are split.

    Args:
        files: The files as stored.
        parts_of: Returns names for the parts of a stored tensor (equal numbers of its rows, or the
            matrices of a stack); empty: it is not split.

    Raises:
        ConfigError: a tensor does not divide into its parts.
    """

    def __init__(self, files: WeightFiles, parts_of: Callable[[str], tuple[str, ...]]) -> None:
        self._files = files
        self._tensors: dict[str, StoredTensor] = {}
        self._places: dict[str, tuple[str, int, int]] = {}
        for name, stored in files.tensors.items():
            if names := parts_of(name):
                self._divide(name, stored, names)
            else:
                self._tensors[name] = stored

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @property
    def num_bytes(self) -> int:
        return self._files.num_bytes

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, or a part of one; copy before writing to it."""
        if name not in self._places:
            return self._files.tensor(name)
        whole, first, rows = self._places[name]
        found = self._files.tensor(whole)[first : first + rows]
        return found[0] if len(self._tensors[name].shape) < found.dim() else found

    def _divide(self, name: str, stored: StoredTensor, names: tuple[str, ...]) -> None:
        rows, left = divmod(stored.shape[0] if stored.shape else 0, len(names))
        if left or not rows:
            raise ConfigError(
                f"tensor {name!r} has {list(stored.shape)}, which does not divide into {len(names)}"
            )
        size = (stored.stop - stored.start) // len(names)
        stacked = len(stored.shape) == 3 and rows == 1
        shape = stored.shape[1:] if stacked else (rows, *stored.shape[1:])
        for number, part in enumerate(names):
            start = stored.start + number * size
            span = {"start": start, "stop": start + size}
            self._tensors[part] = replace(stored, name=part, shape=shape, **span)
            self._places[part] = name, number * rows, rows
