"""Reads PyTorch's own files (`pytorch_model.bin`): pickles, restricted to tensors.

`torch.load(weights_only=True)` allows a fixed list of types and rejects everything else before
calling it, so a file cannot run code. Zip-format files are mapped, older ones are read as a whole.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from sylvan.checkpoints.formats import PT_INDEX, PT_WEIGHTS, check_index, weight_files
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.stored import StoredTensor


class PickledWeights:
    """The tensors of `pytorch_model*.bin`; see `stored.WeightFiles`."""

    def __init__(self, model_dir: Path) -> None:
        """Open all files.

        Raises:
            ConfigError: no such weights, a missing shard, a broken file, or one that contains other
              objects than tensors.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self._values: dict[str, torch.Tensor] = {}
        for file in weight_files(model_dir, PT_INDEX, "pytorch_model.bin", PT_WEIGHTS):
            for name, tensor in read_tensors(file).items():
                self._add(name, tensor, file)
        check_index(model_dir / PT_INDEX, self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.stop for t in self.tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file; copy before writing to it."""
        return self._values[name]

    def _add(self, name: str, tensor: torch.Tensor, file: Path) -> None:
        if name in self.tensors:
            other = self.tensors[name].file.name
            raise ConfigError(f"tensor {name!r} is in both {other} and {file.name}")
        shape, size = tuple(tensor.shape), tensor.numel() * tensor.itemsize
        self.tensors[name] = StoredTensor(name, file, tensor.dtype, shape, 0, size)
        self._values[name] = tensor


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, by name.

    Raises:
        ConfigError: it is broken, or contains other objects than tensors.
    """
    try:
        found = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except Exception as error:  # the library raises many kinds
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise ConfigError(
                f"{str(file)!r} contains other objects than tensors, and reading them could run "
                "code; convert it to safetensors if you trust it"
            ) from error
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{str(file)!r} cannot be read as PyTorch weights: {reason}") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ConfigError(f"{str(file)!r} must be a dict of tensors by name")
    return found
