"""Precomputed embeddings that a client sends instead of an item: neither decoded nor encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sylvan.media.messages import PreparedItem
from sylvan.media.source import MediaSource, decode_base64
from sylvan.protocol.errors import RequestError
from sylvan.protocol.media import MediaKind

FORMAT = "precomputed_embedding"
VECTORS = "vectors"
"""Name of the feature with the embeddings; item option with their shape."""

_GRID = "grid"
MAX_VECTORS = 1 << 17


def read_vectors(kind: MediaKind, given: Mapping[str, Any], path: str) -> MediaSource:
    """Parse an item `{"format": "precomputed_embedding", "feature": ..., "shape": [N, D]}`.

    Args:
        kind: Kind of the item.
        given: `feature` is base64 of float32 (little endian), an array, or a list of lists; `shape`
            is needed for base64; `grid` counts times, rows and columns, for three-axis positions.
        path: Its path in the body.

    Raises:
        RequestError: It has another form; the message names the field.
    """
    feature, where = given.get("feature"), f"{path}.feature"
    if isinstance(feature, str):
        shape = _counts(given.get("shape"), 2, f"{path}.shape")
        data = decode_base64(feature, where)
        if len(data) != 4 * shape[0] * shape[1]:
            message = f"{where}: {len(data)} bytes do not hold float32 numbers of shape {shape}."
            raise RequestError(message, param=where)
        vectors = np.frombuffer(data, "<f4").reshape(shape)
    else:
        try:
            with np.errstate(over="ignore"):  # numbers that are not finite are refused below
                vectors = np.asarray(feature, np.float32)
        except (ValueError, TypeError) as error:
            raise RequestError(f"{where}: expected numbers.", param=where) from error
    if vectors.ndim != 2 or not 0 < len(vectors) <= MAX_VECTORS or not vectors.shape[1]:
        message = f"{where}: expected vectors (N, D), 1 to {MAX_VECTORS} of them."
        raise RequestError(message, param=where)
    if not np.isfinite(vectors).all():
        raise RequestError(f"{where}: expected finite numbers.", param=where)
    options: dict[str, Any] = {VECTORS: list(vectors.shape)}
    if given.get(_GRID) is not None:
        options[_GRID] = grid = _counts(given[_GRID], 3, f"{path}.grid")
        if np.prod(grid) != len(vectors):
            message = f"{path}.grid: {grid} does not hold {len(vectors)} vectors."
            raise RequestError(message, param=f"{path}.grid")
    return MediaSource(kind, path, np.ascontiguousarray(vectors).tobytes(), options=options)


def given_vectors(source: MediaSource, token: int) -> PreparedItem:
    """Return the prompt tokens for embeddings that a client provides."""
    assert source.data is not None
    shape, grid = source.options[VECTORS], source.options.get(_GRID)
    found = hashlib.sha256(f"{FORMAT}|{source.kind}|{shape}|{grid}|".encode())
    found.update(source.data)
    return PreparedItem(
        id=0,
        placeholder=token,
        tokens=(token,) * shape[0],
        features={VECTORS: np.frombuffer(source.data, np.float32).reshape(shape)},
        grid=tuple(grid) if grid else None,
        digest=found.digest(),
    )


def _counts(given: object, size: int, path: str) -> list[int]:
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == size:
        found = [n for n in given if isinstance(n, int) and not isinstance(n, bool) and n > 0]
        if len(found) == size:
            return found
    raise RequestError(f"{path}: expected {size} whole numbers above 0.", param=path)
