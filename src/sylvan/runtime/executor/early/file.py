"""Saved programs: one file with everything that a start without PyTorch needs from a model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from sylvan.kernels.blob import Blob, BlobError, blob_digest, read_blob
from sylvan.kernels.cache_files import CacheFiles
from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.binding import OP
from sylvan.kernels.native.image import BufferSource, ProgramImage
from sylvan.runtime.core.host import BatchLimits
from sylvan.runtime.executor.api import ExecutorCaps

logger = logging.getLogger(__name__)


class SavedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a saved model.

    Attributes:
        facts: Facts for `EngineCore`.
        exact: Whether answers never depend on the batch.
        caps: Facts for the scheduler; the number of pages may differ in a later start.
        limits: Size of the largest step.
        page_bytes: Bytes of a KV page in all layers.
        vocab_size: Columns of logits.
        weights: Name of the file of packed weights, in the same directory.
        weights_digest: `Blob.digest` of that file.
    """

    facts: dict[str, str | int | float | bool | None]
    exact: bool
    caps: ExecutorCaps
    limits: BatchLimits
    page_bytes: int
    vocab_size: int
    weights: str
    weights_digest: str

    def with_pages(self, num_pages: int) -> ExecutorCaps:
        """Return `caps` for a KV cache of this many pages."""
        [group] = self.caps.kv_groups
        return replace(self.caps, kv_groups=(replace(group, num_pages=num_pages),))


class _About(msgspec.Struct, frozen=True):
    """Header of the file, whose first array holds the ops."""

    model: SavedModel
    pieces: list[BufferSource]
    logits: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """A model, its program and its packed weights, as an earlier start saved them."""

    model: SavedModel
    image: ProgramImage
    weights_file: Path
    weights: Blob

    def pages(self, num_pages: int) -> Bytes:
        """Allocate memory for KV. Shape: (pages, bytes of a page)."""
        return allocate(num_pages * self.model.page_bytes).reshape(num_pages, -1)


def save_program(files: CacheFiles, name: str, model: SavedModel, image: ProgramImage) -> None:
    """Save a program for later starts; a failure is only logged."""
    about = msgspec.json.encode(_About(model, list(image.pieces), image.logits))
    arrays = [np.ascontiguousarray(image.records).view(np.uint8), *image.arrays]
    said: dict[str, Any] = {"text": about.decode(), "sum": xxhash.xxh3_64_hexdigest(about)}
    try:
        files.write(name, said, arrays)
    except OSError as error:
        logger.warning("load_cache: the program is not saved: %s", error)


def read_program(files: CacheFiles, name: str) -> SavedProgram | None:
    """Read a program that an earlier start saved; None: there is none, or it is unusable."""
    path = files.folder / name
    try:
        blob = read_blob(path)
        about = _about(blob)
        weights_file = path.with_name(about.model.weights)
        if blob_digest(weights_file) != about.model.weights_digest:
            return None
        weights = read_blob(weights_file)
        files.used(name)
        files.used(weights_file.name)
    except FileNotFoundError:
        return None
    except (BlobError, OSError, msgspec.ValidationError, KeyError) as error:
        logger.warning("load_cache: compiling again: %s", error)
        return None
    records = blob.arrays[0].view(OP)
    image = ProgramImage(records, about.pieces, blob.arrays[1:], about.logits)
    return SavedProgram(about.model, image, weights_file, weights)


def _about(blob: Blob) -> _About:
    text = blob.about["text"].encode()
    if xxhash.xxh3_64_hexdigest(text) != blob.about["sum"] or not blob.arrays:
        raise BlobError("a saved program is damaged: a checksum is wrong")
    return msgspec.json.decode(text, type=_About)
