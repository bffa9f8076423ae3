"""The ranks that run one model together, and how the dimensions of its tensors are divided.

A layer divides its dimensions by `Mesh` and hands the splits to `Build.empty`; loading, pools and
collectives follow from that. No layer or model looks at the number of its rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sylvan.kernels.api import Communicator, RowParts
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, RankLostError


class Alone:
    """Implements `Communicator` for a rank without others."""

    rank = 0
    size = 1

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoRanks:
    """Implements `Communicator` for one of several ranks that never meet: to see sizes."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Refused."""
        raise RankLostError("there are no other ranks")

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Refused."""
        raise RankLostError("there are no other ranks")

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Refused."""
        raise RankLostError("there are no other ranks")

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Share(NamedTuple):
    """Entries [start, start + size) of `whole`."""

    whole: int
    start: int
    size: int

    def times(self, width: int) -> Share:
        """The same share of entries that are `width` wide."""
        return Share(self.whole * width, self.start * width, self.size * width)


class Split:
    """This rank's part of a divided dimension: a share of each tensor joined there, in order."""

    __slots__ = ("shares",)

    def __init__(self, *shares: Share) -> None:
        self.shares = shares

    @property
    def size(self) -> int:
        """Entries that this rank holds."""
        return sum(share.size for share in self.shares)

    @property
    def whole(self) -> int:
        """Entries that there are."""
        return sum(share.whole for share in self.shares)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries that this rank holds, share by share."""
        return tuple(share.size for share in self.shares)

    @property
    def is_divided(self) -> bool:
        """Whether other ranks hold other parts."""
        return self.size != self.whole

    @property
    def places(self) -> IntArray:
        """Which entries of the whole dimension this rank holds."""
        firsts = np.cumsum([0, *(share.whole for share in self.shares)]).tolist()
        parts = [
            np.arange(first + share.start, first + share.start + share.size, dtype=np.int32)
            for first, share in zip(firsts, self.shares, strict=False)
        ]
        return np.concatenate(parts)

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's entries of a whole dimension; a view where they lie together."""
        parts: list[torch.Tensor] = []
        first = 0
        for share in self.shares:
            parts.append(tensor.narrow(dim, first + share.start, share.size))
            first += share.whole
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class HeadShares(NamedTuple):
    """Heads of a rank: of queries, and the heads of keys and values that these look at."""

    queries: Share
    keys: Share


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place among all ranks.

    Attributes:
        tp: The ranks that hold parts of the same layers (tensor parallel).
    """

    tp: Communicator = field(default_factory=Alone)

    def share(self, total: int, what: str) -> Share:
        """An equal share of `total`.

        Raises:
            ConfigError: it does not divide by the number of ranks.
        """
        size = self.tp.size
        if total % size:
            raise ConfigError(f"{what} ({total}) does not divide by {size} ranks")
        return Share(total, total // size * self.tp.rank, total // size)

    def split(self, what: str, *totals: int) -> Split:
        """An equal share of each of several tensors that are joined.

        Raises:
            ConfigError: see `share`.
        """
        return Split(*(self.share(total, what) for total in totals))

    def heads(self, queries: int, keys: int, what: str = "num_key_value_heads") -> HeadShares:
        """Heads by ranks; where there are fewer heads of keys than ranks, some hold the same one.

        Raises:
            ConfigError: the heads of queries do not divide, or ranks would hold parts of heads.
        """
        mine = self.share(queries, "num_attention_heads")
        size = self.tp.size
        if keys < size and size % keys == 0:
            return HeadShares(mine, Share(keys, self.tp.rank * keys // size, 1))
        return HeadShares(mine, self.share(keys, what))

    def rows(self, total: int) -> Share:
        """Rows of a vocabulary: as many on each rank, but for the last ones that have any."""
        each = -(-total // self.tp.size)
        start = min(each * self.tp.rank, total)
        return Share(total, start, min(each, total - start))

    def over(self, split: Split) -> RowParts | None:
        """Which ranks hold parts of rows that are split so; None: this one has them whole."""
        return RowParts(self.tp) if split.is_divided else None


ONE_RANK = Mesh()
