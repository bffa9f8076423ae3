"""Reads the tensors of a GGUF model through its virtual directory.

Each is mapped and, unless stored as plain numbers, dequantised to float32 on access.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sylvan.checkpoints.gguf.quants import library
from sylvan.checkpoints.gguf.view import read_index
from sylvan.runtime.models.stored import StoredTensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """The tensors of GGUF files under the names of the checkpoint; see `stored.WeightFiles`."""

    def __init__(self, model_dir: Path) -> None:
        """Read the index of tensors.

        Raises:
            ConfigError: the directory does not belong to a GGUF file, or the file is gone.
        """
        index = read_index(model_dir)
        files = [Path(part["file"]) for part in index["files"]]
        self._data = [np.memmap(file, np.uint8, mode="c") for file in files]
        self._entries: dict[str, dict[str, Any]] = {t["name"]: t for t in index["tensors"]}
        self.tensors = {
            name: StoredTensor(
                name,
                files[entry["file"]],
                _PLAIN.get(entry["type"], torch.float32),
                tuple(entry["shape"]),
                entry["start"],
                entry["stop"],
            )
            for name, entry in self._entries.items()
        }

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        return sum(t.stop - t.start for t in self.tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor as plain numbers, in the checkpoint's order of rows."""
        stored, entry = self.tensors[name], self._entries[name]
        tensor = _numbers(self._raw(name), entry["type"], stored)
        if added := entry.get("add"):
            tensor = (tensor.float() + added).to(tensor.dtype)
        turned = entry.get("turned")
        return _turned_back(tensor, turned) if turned else tensor

    def _raw(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        return np.asarray(self._data[entry["file"]][entry["start"] : entry["stop"]])

    def kind(self, name: str) -> str:
        """Name of a tensor's type in ggml."""
        return self._entries[name]["type"]

    def blocks(self, name: str) -> torch.Tensor:
        """The bytes of a matrix, in the checkpoint's order of rows. Shape: (N, bytes per row)."""
        rows = torch.from_numpy(self._raw(name)).view(self.tensors[name].shape[0], -1)
        turned = self._entries[name].get("turned")
        return _turned_back(rows, turned) if turned else rows


def _numbers(raw: np.ndarray, kind: str, stored: StoredTensor) -> torch.Tensor:
    if kind in _PLAIN:
        flat = torch.from_numpy(raw if raw.ctypes.data % 4 == 0 else raw.copy())
        return flat.view(stored.dtype).view(stored.shape)
    gguf = library()
    rows = raw.reshape(*stored.shape[:-1], -1)
    numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).view(stored.shape)


def _turned_back(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in checkpoint order; see `checkpoints.gguf.names.entries_of`."""
    halves = tensor.unflatten(0, (heads, -1, 2))
    return halves.transpose(1, 2).reshape(tensor.shape)
