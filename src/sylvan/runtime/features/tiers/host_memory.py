"""The memory of the host tier: slots for pages of each KV group, and for recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.features.tiers.codec import Bytes, Codec, Int8Codec, NumberType, PlainCodec

FREE_SHARE = 0.8
"""Share of the machine's free memory that the host tier may use."""

HostDtype = Literal["same", "int8"]


@dataclass(frozen=True, slots=True)
class HostSize:
    """Size of the host tier.

    Attributes:
        ratio: Slots per device page.
        num_bytes: Its size; instead of `ratio`.
        dtype: `same`: bit-identical to the device; `int8`: KV quantised to 8 bits.
    """

    ratio: float | None
    num_bytes: int | None
    dtype: HostDtype = "same"


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Slots of each group, and their encoding, in the order of the model's groups."""

    slots: tuple[int, ...]
    codecs: tuple[Codec, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        each = zip(self.slots, self.codecs, strict=True)
        return sum(count * codec.encoded_bytes for count, codec in each)

    def kept_bytes(self, groups: Sequence[int]) -> int:
        """Encoded size of pages of these groups."""
        return sum(self.codecs[group].encoded_bytes for group in groups)


def lay_out(
    size: HostSize,
    groups: Sequence[KVGroup],
    page_bytes: Sequence[int],
    numbers: NumberType,
    available_bytes: int,
) -> HostLayout:
    """Divide the host tier among the KV groups, in the device's proportions.

    Raises:
        ConfigError: It is smaller than a page, or larger than free memory allows.
    """
    codecs = tuple(
        Int8Codec(each, numbers)
        if size.dtype == "int8" and group.kind != "state"
        else PlainCodec(each)
        for group, each in zip(groups, page_bytes, strict=True)
    )
    whole = sum(g.num_pages * codec.encoded_bytes for g, codec in zip(groups, codecs, strict=True))
    ratio = size.num_bytes / whole if size.num_bytes is not None else size.ratio or 0.0
    layout = HostLayout(tuple(int(group.num_pages * ratio) for group in groups), codecs)
    name = "tiers.host_bytes" if size.num_bytes is not None else "tiers.host_ratio"
    given = size.num_bytes if size.num_bytes is not None else size.ratio
    if min(layout.slots) < 1:
        raise ConfigError(
            f"{name}={given}: no page of each KV group fits; the device's pages take {whole:,} "
            "bytes there, give a share of that"
        )
    limit = int(FREE_SHARE * available_bytes)
    if layout.num_bytes > limit:
        raise ConfigError(
            f"{name}={given} takes {layout.num_bytes:,} bytes of host memory; at most {limit:,} "
            f"may be used ({FREE_SHARE:.0%} of what is free)"
        )
    return layout


class HostMemory:
    """Reads and writes slots. Each call is one page; thread-safe.

    If a slot is read while being written, the reader must discard the result.
    """

    def __init__(self, layout: HostLayout) -> None:
        self.layout = layout
        each = zip(layout.slots, layout.codecs, strict=True)
        self._slots: tuple[NDArray[np.uint8], ...] = tuple(
            np.empty((count, codec.encoded_bytes), np.uint8) for count, codec in each
        )

    def write(self, group: int, slot: int, page: Bytes) -> int:
        """Store a page; return its encoded size."""
        codec = self.layout.codecs[group]
        codec.encode(page, self._slots[group][slot])
        return codec.encoded_bytes

    def read(self, group: int, slot: int, page: Bytes) -> None:
        """Read a page."""
        self.layout.codecs[group].decode(self._slots[group][slot], page)
