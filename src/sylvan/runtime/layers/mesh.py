"""The ranks that run one model together, and how the dimensions of its tensors are divided.

A layer divides its dimensions by `Mesh` and hands the splits to `Build.empty`; loading, pools and
collectives follow from that. No layer or model looks at the number of its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sylvan.kernels.api import Communicator, RowParts
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, RankLostError
from sylvan.runtime.layers.placement import ExpertPlacement, LayerSlots
from sylvan.runtime.layers.stage import WHOLE_MODEL, Stage

_PARTS = (8, 4, 2)
_PART_COLUMNS = 32  # which kernels read together


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


class Picked(Split):
    """Some entries of a dimension, by their numbers and in this order."""

    __slots__ = ("_whole",)

    def __init__(self, whole: int, numbers: Sequence[int]) -> None:
        super().__init__(*(Share(whole, number, 1) for number in numbers))
        self._whole = whole

    @property
    def whole(self) -> int:
        return self._whole

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the entries that this rank holds."""
        return tuple(share.start for share in self.shares)

    @property
    def is_divided(self) -> bool:
        return True

    @property
    def places(self) -> IntArray:
        return np.array(self.numbers, np.int32)

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        numbers = self.numbers
        if numbers == tuple(range(numbers[0], numbers[0] + len(numbers))):
            return tensor.narrow(dim, numbers[0], len(numbers))
        return tensor.index_select(dim, torch.tensor(numbers))


class HeadShares(NamedTuple):
    """Heads of a rank: of queries, and the heads of keys and values that these look at."""

    queries: Share
    keys: Share


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place among all ranks.

    Attributes:
        tp: The ranks that hold parts of the same layers (tensor parallel).
        ep: Groups of these among which experts are divided (expert parallel); 1: every rank has a
            share of each expert.
        placement: Which group has which experts; needed where there are several groups.
        same_bits: Products that are summed over ranks are sums of as many parts on any number of
            them, in one order.
        stage: Which layers these ranks hold (pipeline parallel).
    """

    tp: Communicator = field(default_factory=Alone)
    ep: int = 1
    placement: ExpertPlacement | None = None
    same_bits: bool = False
    stage: Stage = WHOLE_MODEL

    def check(self) -> None:
        """Raise RankLostError if a collective or a link has failed."""
        self.tp.check()
        self.stage.check()

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

    @property
    def column_ranks(self) -> int:
        """Ranks that share the columns of an expert."""
        return self.tp.size // self.ep

    @property
    def adds_expert_bias(self) -> bool:
        """Whether this rank adds what is to be added once for each expert."""
        return self.tp.rank % self.column_ranks == 0

    def expert_columns(self, total: int, what: str) -> Share:
        """An equal share of the columns of the experts that this rank's group has.

        Raises:
            ConfigError: see `share`.
        """
        size = self.column_ranks
        if self.same_bits and size > 1:
            raise ConfigError(
                "parallel.same_bits: ranks have parts of the same experts; give parallel.ep="
                f"{self.tp.size}, so that each has whole ones"
            )
        if total % size:
            raise ConfigError(f"{what} ({total}) does not divide by {size} ranks")
        return Share(total, total // size * (self.tp.rank % size), total // size)

    def experts(self, total: int, layer: int) -> LayerSlots | None:
        """Which experts of a layer this rank's group has; None: every rank has a share of all.

        Raises:
            ConfigError: they cannot be divided among the groups.
        """
        if self.ep == 1:
            return None
        assert self.placement is not None, "several groups have a placement"
        return self.placement.of_layer(layer, total)

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

    def partial_sums(self, inputs: Share, what: str) -> int:
        """In how many parts this rank adds up a product over its share of the inputs.

        Raises:
            ConfigError: they cannot be summed alike on one rank and on these.
        """
        if not self.same_bits:
            return 1
        parts = next((n for n in _PARTS if inputs.whole % (n * _PART_COLUMNS) == 0), 1)
        if parts % self.tp.size:
            raise ConfigError(
                f"parallel.same_bits: {what} ({inputs.whole}) are summed in {parts} parts of a "
                f"multiple of {_PART_COLUMNS}, which do not divide by {self.tp.size} ranks"
            )
        return parts // self.tp.size

    def rows(self, total: int) -> Share:
        """Rows of a vocabulary: as many on each rank, but for the last ones that have any."""
        each = -(-total // self.tp.size)
        start = min(each * self.tp.rank, total)
        return Share(total, start, min(each, total - start))

    def over(self, split: Split) -> RowParts | None:
        """Which ranks hold parts of rows that are split so; None: this one has them whole."""
        if self.same_bits and split.is_divided:
            raise ConfigError(
                "parallel.same_bits: norms over whole projections are taken over all ranks, in "
                "another order than on one"
            )
        return RowParts(self.tp) if split.is_divided else None


ONE_RANK = Mesh()
