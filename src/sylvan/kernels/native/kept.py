"""Packed weights that outlive the process: a later start reads them instead of packing again."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.blob import Blob, BlobError, read_blob, write_blob
from sylvan.kernels.matmul.codes import Code
from sylvan.kernels.matmul.packed import PackedWeight
from sylvan.kernels.matmul.weights import DeferredWeight, Form, PackKind
from sylvan.kernels.memory import Bytes

logger = logging.getLogger(__name__)

SUFFIX = ".weights"
MOST_FILES = 8
"""Maximum number of files in a directory; the least recently used are deleted."""
_SPARE_BYTES = 1 << 30  # that stay free on the disk


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A `PackedWeight` without its memory, which `parts` numbers."""

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
class KeptWeights:
    """The weights of one checkpoint in one way of packing, in a file.

    Attributes:
        path: Its name says all that the contents depend on.
        numbers: Of the arrays in the file, by their addresses in memory.
    """

    path: Path
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    _found: dict[str, PackedWeight] = field(default_factory=dict[str, PackedWeight])
    _shapes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    _new: dict[str, tuple[PackedWeight, list[int]]] = field(
        default_factory=dict[str, tuple[PackedWeight, list[int]]]
    )

    @classmethod
    def open(cls, path: Path, blob: Blob | None = None) -> KeptWeights:
        """Read what an earlier start has left; a file that is damaged counts as none.

        Args:
            path: The file.
            blob: Its contents, if they have been read already.
        """
        kept = cls(path)
        try:
            kept._read(blob or read_blob(path))
            os.utime(path)
        except FileNotFoundError:
            pass
        except (BlobError, OSError, msgspec.ValidationError, KeyError, IndexError) as error:
            logger.warning("load_cache: packing again: %s", error)
            kept._found.clear()
            kept.numbers.clear()
        return kept

    def take(self, weight: LinearWeight) -> PackedWeight | None:
        """A weight as it was packed before; None: it has to be packed."""
        if not isinstance(weight, DeferredWeight):
            return None
        if self._shapes.get(weight.key) != list(weight.shape):
            return None
        return self._found.get(weight.key)

    def keep(self, weight: LinearWeight, packed: PackedWeight) -> None:
        """Store a weight with `write`; weights without a checkpoint name are not stored."""
        if isinstance(weight, DeferredWeight):
            self._new[weight.key] = packed, list(weight.shape)

    def write(self) -> None:
        """Leave the weights for later starts, if some were packed; a failure is logged only."""
        if not self._new:
            return
        old = {key: (packed, self._shapes[key]) for key, packed in self._found.items()}
        entries: list[_Entry] = []
        arrays: list[Bytes] = []
        for key, (packed, shape) in (old | self._new).items():
            entries.append(_entry(key, shape, packed, len(arrays)))
            arrays.extend(packed.parts.values())
        size = sum(array.nbytes for array in arrays)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            write_blob(self.path, msgspec.to_builtins(_About(entries)), arrays)
        except OSError as error:
            logger.warning("load_cache: packed weights are not kept: %s", error)
        else:
            self.numbers = {array.ctypes.data: i for i, array in enumerate(arrays)}
            logger.info("load_cache: kept %.2f GB of packed weights", size / 1e9)
        self._new.clear()

    def _make_room(self, size: int) -> None:
        files = sorted(self.path.parent.glob(f"*{SUFFIX}"), key=lambda f: f.stat().st_mtime)
        for old in files[: max(0, len(files) - MOST_FILES + 1)]:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
        free = shutil.disk_usage(self.path.parent).free
        if free < size + _SPARE_BYTES:
            raise OSError(f"{size:,} bytes are needed, {free:,} are free on the disk")

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
