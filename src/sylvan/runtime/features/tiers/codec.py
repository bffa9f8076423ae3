"""Encodings of pages in the host tier: unchanged, or quantised to 8 bits."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
NumberType = Literal["float32", "bfloat16", "float16"]

BLOCK = 64
"""Numbers per scale."""
_LARGEST = 127
_SCALE_BYTES = 4


class Codec(Protocol):
    """Encodes pages of one size.

    Attributes:
        page_bytes: Size of a page on the device.
        encoded_bytes: Size of an encoded page.
    """

    page_bytes: int
    encoded_bytes: int

    def encode(self, page: Bytes, kept: Bytes) -> None:
        """Encode a page (page_bytes,) into a buffer (encoded_bytes,)."""
        ...

    def decode(self, kept: Bytes, page: Bytes) -> None:
        """Decode a page; exact up to quantisation."""
        ...


class PlainCodec:
    """Keeps the bytes unchanged."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = self.encoded_bytes = page_bytes

    def encode(self, page: Bytes, kept: Bytes) -> None:
        np.copyto(kept, page)

    def decode(self, kept: Bytes, page: Bytes) -> None:
        np.copyto(page, kept)


class Int8Codec:
    """Stores blocks of `BLOCK` numbers as int8, with a float32 scale per block.

    The error of a number is at most half a scale, 1/254 of the block's largest magnitude, plus the
    rounding of its dtype. A non-finite number makes its block non-finite.

    Args:
        page_bytes: Size of a page; a whole number of numbers.
        numbers: dtype of the numbers in a page.
    """

    def __init__(self, page_bytes: int, numbers: NumberType) -> None:
        self.page_bytes = page_bytes
        self._numbers: NumberType = numbers
        self._count = page_bytes // (4 if numbers == "float32" else 2)
        self._blocks = -(-self._count // BLOCK)
        self._whole = self._count == self._blocks * BLOCK
        self.encoded_bytes = self._blocks * (BLOCK + _SCALE_BYTES)

    def encode(self, page: Bytes, kept: Bytes) -> None:
        values = _floats(page, self._numbers)
        if not self._whole:
            values = np.pad(values, (0, self._blocks * BLOCK - self._count))
        blocks = values.reshape(self._blocks, BLOCK)
        scales, integers = self._views(kept)
        with np.errstate(all="ignore"):
            np.divide(np.abs(blocks).max(axis=1), _LARGEST, out=scales)
            divisors = np.where(scales > 0, scales, 1)
            rounded = np.rint(blocks / divisors[:, None])
            integers[...] = np.clip(np.nan_to_num(rounded), -_LARGEST, _LARGEST)

    def decode(self, kept: Bytes, page: Bytes) -> None:
        scales, integers = self._views(kept)
        with np.errstate(all="ignore"):
            values = (integers * scales[:, None]).reshape(-1)[: self._count]
            _write(values, page, self._numbers)

    def _views(self, kept: Bytes) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        """Return scales (blocks,) and integers (blocks, BLOCK) of an encoded page."""
        end = self._blocks * _SCALE_BYTES
        integers = kept[end:].view(np.int8).reshape(self._blocks, BLOCK)
        return kept[:end].view(np.float32), integers


def _floats(page: Bytes, numbers: NumberType) -> NDArray[np.float32]:
    match numbers:
        case "float32":
            return page.view(np.float32)
        case "float16":
            return page.view(np.float16).astype(np.float32)
        case "bfloat16":
            return (page.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _write(values: NDArray[np.float32], page: Bytes, numbers: NumberType) -> None:
    match numbers:
        case "float32":
            page.view(np.float32)[...] = values
        case "float16":
            page.view(np.float16)[...] = values.astype(np.float16)
        case "bfloat16":
            bits = values.view(np.uint32)
            even = bits + 0x7FFF + ((bits >> 16) & 1)  # round to nearest, ties to even
            rounded = np.where(np.isfinite(values), even, bits) >> 16
            page.view(np.uint16)[...] = rounded.astype(np.uint16)
