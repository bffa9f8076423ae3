"""Caches packed weights in a file, which later starts read instead of packing again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.blob import Blob, BlobError, read_blob
from sylvan.kernels.cache_files import CacheFiles
from sylvan.kernels.matmul.codes import Code
from sylvan.kernels.matmul.packed import PackedWeight
from sylvan.kernels.matmul.weights import DeferredWeight, Form, PackKind
from sylvan.kernels.memory import Bytes

logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A `PackedWeight` without its memory; `parts` are indices of arrays."""

    key: str
    shape: list[int]
    kind: PackKind
    rows: int
    cols: int
    padded_rows: int
    words: int
    group: int
    form: tuple[PackKind, int, Code | str, str, bool, bool, bool]
    parts: dict[str, int]


class _About(msgspec.Struct, frozen=True):
    weights: list[_Entry]


@dataclass(slots=True)
class PackedWeightFile:
    """The file with the packed weights of one checkpoint.

    Attributes:
        files: The cache directory.
        name: Name of the file, which identifies everything that the contents depend on.
        numbers: Indices of arrays in the file, by address in memory; see `number_arrays`.
        failed: Whether the file could not be written.
    """

    files: CacheFiles
    name: str
    failed: bool = False
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    _found: dict[str, PackedWeight] = field(default_factory=dict[str, PackedWeight])
    _shapes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    _new: dict[str, tuple[PackedWeight, list[int]]] = field(
        default_factory=dict[str, tuple[PackedWeight, list[int]]]
    )
    _entries: list[_Entry] = field(default_factory=list[_Entry])
    _arrays: list[Bytes] = field(default_factory=list[Bytes])

    @classmethod
    def open(cls, files: CacheFiles, name: str, blob: Blob | None = None) -> PackedWeightFile:
        """Read the file of an earlier start; a damaged one counts as missing.

        Args:
            files: The cache directory.
            name: Name of the file.
            blob: Its contents, if they have been read already.
        """
        kept = cls(files, name)
        try:
            kept._read(blob or read_blob(kept.path))
            files.used(name)
        except FileNotFoundError:
            pass
        except (BlobError, OSError, msgspec.ValidationError, KeyError, IndexError) as error:
            logger.warning("load_cache: cached weights cannot be used, packing again: %s", error)
            kept._found.clear()
            kept.numbers.clear()
        return kept

    def take(self, weight: LinearWeight) -> PackedWeight | None:
        """Return a weight as packed earlier; None: it must be packed."""
        if not isinstance(weight, DeferredWeight):
            return None
        if self._shapes.get(weight.key) != list(weight.shape):
            return None
        return self._found.get(weight.key)

    def keep(self, weight: LinearWeight, packed: PackedWeight) -> None:
        """Store a weight with `write`; weights without a checkpoint name are not stored."""
        if isinstance(weight, DeferredWeight):
            self._new[weight.key] = packed, list(weight.shape)

    @property
    def path(self) -> Path:
        """The file, which may not exist."""
        return self.files.folder / self.name

    @property
    def unwritten(self) -> bool:
        """Whether there are weights to `write`."""
        return bool(self._entries)

    def number_arrays(self) -> None:
        """Assign each array its index in the file, after all weights have been packed."""
        if not self._new:
            return
        old = {key: (packed, self._shapes[key]) for key, packed in self._found.items()}
        for key, (packed, shape) in (old | self._new).items():
            self._entries.append(_entry(key, shape, packed, len(self._arrays)))
            self._arrays.extend(packed.parts.values())
        self.numbers = {array.ctypes.data: i for i, array in enumerate(self._arrays)}
        self._new.clear()

    def write(self, ended: Callable[[], bool]) -> None:
        """Write the weights for later starts; a failure is only logged.

        Blocks; stops early once `ended` returns true. The weights must not change meanwhile.
        """
        size = sum(array.nbytes for array in self._arrays)
        about = msgspec.to_builtins(_About(self._entries))
        try:
            self.files.write(self.name, about, self._arrays, ended)
        except OSError as error:
            self.failed = True
            logger.warning("load_cache: cannot write packed weights: %s", error)
        else:
            logger.info("load_cache: wrote %.2f GB of packed weights", size / 1e9)
        self._entries, self._arrays = [], []

    def _read(self, blob: Blob) -> None:
        self.numbers = {array.ctypes.data: i for i, array in enumerate(blob.arrays)}
        for entry in msgspec.convert(blob.about, _About).weights:
            parts: dict[str, Any] = {
                name: blob.arrays[number] for name, number in entry.parts.items()
            }
            kind, group, code, scale, *more = entry.form
            self._found[entry.key] = PackedWeight(
                kind=entry.kind,
                rows=entry.rows,
                cols=entry.cols,
                padded_rows=entry.padded_rows,
                words=entry.words,
                group=entry.group,
                form=Form(kind, group, msgspec.convert(code, Code) if code else "",
                          getattr(torch, scale), *more),
                **parts,
            )  # fmt: skip
            self._shapes[entry.key] = entry.shape


def _entry(key: str, shape: list[int], packed: PackedWeight, first: int) -> _Entry:
    form = packed.form
    scale = str(form.scale).removeprefix("torch.")
    return _Entry(
        key=key,
        shape=shape,
        kind=packed.kind,
        rows=packed.rows,
        cols=packed.cols,
        padded_rows=packed.padded_rows,
        words=packed.words,
        group=packed.group,
        form=(form.kind, form.group, form.code, scale, form.zeros, form.shifts, form.ordered),
        parts={name: first + place for place, name in enumerate(packed.parts)},
    )
