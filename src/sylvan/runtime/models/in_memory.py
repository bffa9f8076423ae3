"""Weight files over tensors that are already in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.checkpoints.headers import TensorHeader, read_header_of
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.safetensors import DTYPES
from sylvan.runtime.models.stored import StoredTensor, WeightFiles

_PICKLES = (b"\x80", b"PK")  # first bytes of plain pickles and of torch.save files
_NOWHERE = Path("memory")


class InMemory:
    """Implements `WeightFiles` over tensors; keeps `owner`, which may own their memory, alive."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], owner: object = None) -> None:
        self._values, self._owner = dict(tensors), owner
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(
                name, _NOWHERE, value.dtype, tuple(value.shape), 0, value.numel() * value.itemsize
            )
            for name, value in self._values.items()
        }

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.stop for tensor in self.tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor; copy before writing to it."""
        return self._values[name]


class Merged:
    """Implements `WeightFiles` over several; later files override earlier ones."""

    def __init__(self, parts: Sequence[WeightFiles]) -> None:
        self._of = {name: part for part in parts for name in part.tensors}
        self.tensors: Mapping[str, StoredTensor] = {
            name: part.tensors[name] for name, part in self._of.items()
        }

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.stop - tensor.start for tensor in self.tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor; copy before writing to it."""
        return self._of[name].tensor(name)


def read_safetensors(data: NDArray[np.uint8], where: str, owner: object = None) -> InMemory:
    """The tensors of a safetensors file in memory, without copying them.

    Args:
        data: The file, (n,).
        where: Name of the source in errors.
        owner: Object to keep alive as long as the tensors.

    Raises:
        ConfigError: the file is truncated or broken; names the tensor.
    """
    try:
        entries, begin = read_header_of(data.data, where)
    except ConfigError:
        if not data[:2].tobytes().startswith(_PICKLES):
            raise
        raise ConfigError(
            f"{where!r} is a pickle, which could run code; send a safetensors file"
        ) from None
    found = {n: _tensor(n, entry, data[begin:], where) for n, entry in entries.items()}
    return InMemory(found, (data, owner))


def _tensor(name: str, entry: TensorHeader, data: NDArray[np.uint8], where: str) -> torch.Tensor:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ConfigError(f"{where!r}: tensor {name!r} has the unsupported type {entry.dtype!r}")
    if entry.stop > len(data):
        raise ConfigError(
            f"{where!r} is cut off: tensor {name!r} ends at byte {entry.stop} of the data, but "
            f"only {len(data)} are there"
        )
    if entry.stop - entry.start != math.prod(entry.shape) * dtype.itemsize:
        raise ConfigError(
            f"{where!r}: size of tensor {name!r} contradicts its shape {list(entry.shape)}"
        )
    raw: NDArray[Any] = data[entry.start : entry.stop]
    if entry.start == entry.stop:
        return torch.empty(entry.shape, dtype=dtype)
    if raw.ctypes.data % dtype.itemsize or not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).view(entry.shape)
