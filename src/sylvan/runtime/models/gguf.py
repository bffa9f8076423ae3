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
        if halves := entry.get("halves"):
            return self._joined(*halves).view(stored.shape)
        tensor = _numbers(self._raw(entry), entry["type"], stored.shape)
        if entry.get("decay"):
            tensor = tensor.neg().log()
        if added := entry.get("add"):
            tensor = (tensor.float() + added).to(tensor.dtype)
        if tiles := entry.get("tiled"):
            tensor = tensor.index_select(tiles["dim"], untiled(tiles, tensor.shape[tiles["dim"]]))
        interleaved_heads = entry.get("interleaved_heads")
        return _deinterleaved(tensor, interleaved_heads) if interleaved_heads else tensor

    def _joined(self, keys: dict[str, Any], values: dict[str, Any]) -> torch.Tensor:
        """An up-projection of latent attention. Shape: (H, D of keys and values, latent)."""
        of_keys, of_values = (
            _numbers(self._raw(half), half["type"], tuple(half["shape"])).float()
            for half in (keys, values)
        )
        return torch.cat((of_keys.transpose(1, 2), of_values), 1)

    def _raw(self, entry: dict[str, Any]) -> np.ndarray:
        return np.asarray(self._data[entry["file"]][entry["start"] : entry["stop"]])

    def kind(self, name: str) -> str:
        """Name of a tensor's type in ggml."""
        return self._entries[name]["type"]

    def blocks(self, name: str) -> torch.Tensor:
        """The bytes of a matrix, in the checkpoint's order of rows. Shape: (N, bytes of a row)."""
        entry = self._entries[name]
        rows = torch.from_numpy(self._raw(entry)).view(self.tensors[name].shape[0], -1)
        tiles = entry.get("tiled")
        if tiles and not tiles["dim"]:
            rows = rows[untiled(tiles, len(rows))]
        interleaved_heads = entry.get("interleaved_heads")
        return _deinterleaved(rows, interleaved_heads) if interleaved_heads else rows

    def order(self, name: str) -> torch.Tensor | None:
        """Which input of the matrix each of the file's is, int32 (K,); None: the same."""
        tiles = self._entries[name].get("tiled")
        if not tiles or not tiles["dim"]:
            return None
        return untiled(tiles, self.tensors[name].shape[1]).argsort().int()


def _numbers(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    if kind in _PLAIN:
        flat = torch.from_numpy(raw if raw.ctypes.data % 4 == 0 else raw.copy())
        return flat.view(_PLAIN[kind]).view(shape)
    gguf = library()
    rows = raw.reshape(*shape[:-1], -1)
    numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).view(shape)


def untiled(tiles: dict[str, int], count: int) -> torch.Tensor:
    """Where rows of the checkpoint lie in the file, int64 (N,); see `names._tiles`."""
    places = torch.arange(count)
    heads = places[tiles["before"] :].view(tiles["each"], tiles["groups"], tiles["size"])
    return torch.cat((places[: tiles["before"]], heads.transpose(0, 1).flatten()))


def _deinterleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in checkpoint order; see `checkpoints.gguf.names.entries_of`."""
    halves = tensor.unflatten(0, (heads, -1, 2))
    return halves.transpose(1, 2).reshape(tensor.shape)
