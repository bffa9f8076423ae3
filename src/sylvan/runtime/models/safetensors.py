"""Reads safetensors files by memory mapping: a header of JSON, then raw tensors.

Format: 8 bytes little-endian header length, the header, the data. Mapped pages come from the page
cache, so that several servers of one checkpoint share it until they convert it.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from pathlib import Path

import numpy as np
import torch

from sylvan.checkpoints.formats import SAFETENSORS_INDEX, check_index, weight_files
from sylvan.checkpoints.headers import read_header
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.stored import StoredTensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in a header."""
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""Names of types in headers."""
_MAX_RESIDENT = 8  # newest tensors whose pages stay resident; more than are converted at a time


class Checkpoint:
    """The tensors of a model directory by name, mapped on access.

    Most tensors are converted once and never read again, so the pages of earlier ones are released;
    a later reader gets them from the page cache or the file.
    """

    def __init__(self, model_dir: Path) -> None:
        """Read the headers of all files.

        Raises:
            ConfigError: no weights, a missing shard, or a broken file.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self._regions: dict[Path, tuple[mmap.mmap, int]] = {}  # mapping, and offset of the data
        self._resident: deque[StoredTensor] = deque()
        for file in weight_files(
            model_dir, SAFETENSORS_INDEX, "model.safetensors", "*.safetensors"
        ):
            self._read_header(file)
        check_index(model_dir / SAFETENSORS_INDEX, self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.stop - t.start for t in self.tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file; copy before writing to it."""
        stored = self.tensors[name]
        if stored.start == stored.stop:
            return torch.empty(stored.shape, dtype=stored.dtype)
        region, begin = self._regions[stored.file]
        raw = np.frombuffer(region, np.uint8, stored.stop - stored.start, begin + stored.start)
        self._resident.append(stored)
        if len(self._resident) > _MAX_RESIDENT:
            self._release_tensor(self._resident.popleft())
        flat = torch.from_numpy(raw)
        if raw.ctypes.data % stored.dtype.itemsize:
            flat = flat.clone()
        return flat.view(stored.dtype).view(stored.shape)

    def _release_tensor(self, stored: StoredTensor) -> None:
        """Release a tensor's whole pages from residency."""
        region, begin = self._regions[stored.file]
        _release(region, begin + stored.start, begin + stored.stop)

    def release(self, rows: torch.Tensor) -> None:
        """Release the whole pages of rows of a tensor; has no effect on other memory."""
        if not rows.is_contiguous():
            return
        for region, _ in self._regions.values():
            start = rows.data_ptr() - np.frombuffer(region, np.uint8).ctypes.data
            if 0 <= start < len(region):
                _release(region, start, start + rows.nbytes)

    def _read_header(self, file: Path) -> None:
        entries, begin = read_header(file)
        with file.open("rb") as stream:
            size = file.stat().st_size
            self._regions[file] = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY), begin
        for name, entry in entries.items():
            if (dtype := DTYPES.get(entry.dtype)) is None:
                raise ConfigError(
                    f"{str(file)!r}: cannot read the entry of tensor {name!r}, of numbers "
                    f"{entry.dtype!r}"
                )
            stored = StoredTensor(name, file, dtype, entry.shape, entry.start, entry.stop)
            self._add(stored, size - begin)

    def _add(self, tensor: StoredTensor, data_bytes: int) -> None:
        if tensor.stop > data_bytes:
            raise ConfigError(
                f"{str(tensor.file)!r} is truncated: tensor {tensor.name!r} ends at byte "
                f"{tensor.stop} of the data, but only {data_bytes} are there"
            )
        if tensor.stop - tensor.start != math.prod(tensor.shape) * tensor.dtype.itemsize:
            raise ConfigError(
                f"{str(tensor.file)!r}: size of tensor {tensor.name!r} contradicts its shape "
                f"{list(tensor.shape)}"
            )
        if tensor.name in self.tensors:
            other = self.tensors[tensor.name].file.name
            raise ConfigError(f"tensor {tensor.name!r} is in both {other} and {tensor.file.name}")
        self.tensors[tensor.name] = tensor


def _release(region: mmap.mmap, start: int, stop: int) -> None:
    """Release the whole pages among bytes of a mapped file from residency."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop and hasattr(mmap, "MADV_DONTNEED"):
        region.madvise(mmap.MADV_DONTNEED, start, stop - start)
