"""The bytes of the host tier: slots for pages of each KV group, and for recurrent states."""

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
"""Of the machine's free memory, that the host tier may take."""

HostDtype = Literal["same", "int8"]


@dataclass(frozen=True, slots=True)
class HostSize:
    """How large the host tier is to be.

    Attributes:
        ratio: Pages of it for each page of the device.
        num_bytes: Its size; instead of `ratio`.
        dtype: `same`: the bits that the device has; `int8`: keys and values rounded to 8 bits.
    """

    ratio: float | None
    num_bytes: int | None
    dtype: HostDtype = "same"


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Slots of each group, and how they keep a page, in the order of the model's groups."""

    slots: tuple[int, ...]
    codecs: tuple[Codec, ...]

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        each = zip(self.slots, self.codecs, strict=True)
        return sum(count * codec.encoded_bytes for count, codec in each)

    def kept_bytes(self, groups: Sequence[int]) -> int:
        """What pages of these groups take."""
        return sum(self.codecs[group].encoded_bytes for group in groups)


def lay_out(
    size: HostSize,
    groups: Sequence[KVGroup],
    page_bytes: Sequence[int],
    numbers: NumberType,
    available_bytes: int,
) -> HostLayout:
    """Share the host tier among the groups of a model, as the device's memory is.

    Raises:
        ConfigError: it is smaller than a page, or larger than the machine's free memory allows.
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
    most = int(FREE_SHARE * available_bytes)
    if layout.num_bytes > most:
        raise ConfigError(
            f"{name}={given} takes {layout.num_bytes:,} bytes of host memory; at most {most:,} can "
            f"be had ({FREE_SHARE:.0%} of what is free)"
        )
    return layout


class HostMemory:
    """Reads and writes slots. Each call is one page; threads may call at the same time.

    A slot that is read while it is written gives neither: whoever reads it drops it then.
    """

    def __init__(self, layout: HostLayout) -> None:
        self.layout = layout
        each = zip(layout.slots, layout.codecs, strict=True)
        self._slots: tuple[NDArray[np.uint8], ...] = tuple(
            np.empty((count, codec.encoded_bytes), np.uint8) for count, codec in each
        )

    def write(self, group: int, slot: int, page: Bytes) -> int:
        """Keep a page; returns the bytes that it takes."""
        codec = self.layout.codecs[group]
        codec.encode(page, self._slots[group][slot])
        return codec.encoded_bytes

    def read(self, group: int, slot: int, page: Bytes) -> None:
        """Bring back a page."""
        self.layout.codecs[group].decode(self._slots[group][slot], page)
