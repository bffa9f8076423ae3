"""The ranks that share a model, and how they shard the dimensions of its tensors.

A layer splits its dimensions with `Mesh` and passes the splits to `Build.empty`; loading, pools and
collectives follow from them. No layer or model reads its rank number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sylvan.kernels.api import Communicator, RowDispatcher, RowParts
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, RankLostError
from sylvan.runtime.layers.placement import ExpertPlacement, LayerSlots
from sylvan.runtime.layers.row_groups import RowGroups
from sylvan.runtime.layers.stage import WHOLE_MODEL, Stage

_PARTS = (8, 4, 2)
_PART_COLUMNS = 32  # columns that kernels read together


class SingleRank:
    """Implements `Communicator` for a single rank."""

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


class UnconnectedRank:
    """Implements `Communicator` for one of several ranks that are not connected; has sizes only."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Raise an error."""
        raise RankLostError("there are no other ranks")

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Raise an error."""
        raise RankLostError("there are no other ranks")

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Raise an error."""
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
        """The same share of entries that have `width` columns each."""
        return Share(self.whole * width, self.start * width, self.size * width)


class Split:
    """This rank's shard of a dimension: a share of each tensor joined there, in order."""

    __slots__ = ("shares",)

    def __init__(self, *shares: Share) -> None:
        self.shares = shares

    @property
    def size(self) -> int:
        """Number of entries that this rank holds."""
        return sum(share.size for share in self.shares)

    @property
    def whole(self) -> int:
        """Number of entries in total."""
        return sum(share.whole for share in self.shares)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries that this rank holds, by share."""
        return tuple(share.size for share in self.shares)

    @property
    def is_divided(self) -> bool:
        """Whether other ranks hold other shards."""
        return self.size != self.whole

    @property
    def places(self) -> IntArray:
        """Indices of the entries that this rank holds."""
        firsts = np.cumsum([0, *(share.whole for share in self.shares)]).tolist()
        parts = [
            np.arange(first + share.start, first + share.start + share.size, dtype=np.int32)
            for first, share in zip(firsts, self.shares, strict=False)
        ]
        return np.concatenate(parts)

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's entries of an unsharded tensor; a view if contiguous."""
        parts: list[torch.Tensor] = []
        first = 0
        for share in self.shares:
            parts.append(tensor.narrow(dim, first + share.start, share.size))
            first += share.whole
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class IndexSelection(Split):
    """Selected entries of a dimension, by index and in this order."""

    __slots__ = ("_whole",)

    def __init__(self, whole: int, numbers: Sequence[int]) -> None:
        super().__init__(*(Share(whole, number, 1) for number in numbers))
        self._whole = whole

    @property
    def whole(self) -> int:
        return self._whole

    @property
    def numbers(self) -> tuple[int, ...]:
        """Indices of the entries that this rank holds."""
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
    """Heads of a rank: query heads, and the key/value heads that they read."""

    queries: Share
    keys: Share


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank among all ranks, and which of them share what.

    Attributes:
        tp: Ranks that hold shards of the same layers (tensor parallelism).
        ep: Number of groups of these that hold different experts (expert parallelism); 1: every
          rank holds a share of each expert.
        placement: Which group holds which experts; needed if there are several groups.
        same_bits: Whether products summed over ranks are sums of the same parts in the same order
          for any number of ranks, so that results are bit-identical.
        stage: Layers that these ranks hold (pipeline parallelism).
        all_to_all: Whether the outputs of experts go to one rank each, which sums them.
        dispatcher: Sends rows to the ranks of their experts; None: ranks take them from the rows
           that all of them have.
        dense: Ranks that share a feed-forward block without experts, in models with experts; None:
          all of `tp`.
        attention: Ranks that share the heads of the same requests (attention data parallelism);
          None: all of `tp`, which then have the same KV.
    """

    tp: Communicator = field(default_factory=SingleRank)
    ep: int = 1
    placement: ExpertPlacement | None = None
    same_bits: bool = False
    stage: Stage = WHOLE_MODEL
    attention: Communicator | None = None
    all_to_all: bool = False
    dense: Communicator | None = None
    dispatcher: RowDispatcher | None = None

    def check(self) -> None:
        """Raise RankLostError if a collective or a link has failed."""
        self.tp.check()
        for group in (self.attention, self.dense):
            if group is not None:
                group.check()
        self.stage.check()

    @property
    def attention_dp(self) -> int:
        """Number of groups of ranks with different requests; 1: every rank has all requests."""
        return 1 if self.attention is None else self.tp.size // self.attention.size

    @property
    def row_groups(self) -> RowGroups | None:
        """How attention layers divide the rows of a step; None: every rank has all of them."""
        if self.attention is None:
            return None
        size = self.attention.size
        return RowGroups(self.tp, size, self.tp.rank // size)

    def share(self, total: int, what: str) -> Share:
        """An equal share of `total`.

        Raises:
            ConfigError: it does not divide by the number of ranks.
        """
        return _share(self.tp, total, what)

    def split(self, what: str, *totals: int) -> Split:
        """Split a dimension where tensors of these sizes are joined: an equal share of each.

        Raises:
            ConfigError: see `share`.
        """
        return Split(*(self.share(total, what) for total in totals))

    @property
    def column_ranks(self) -> int:
        """Number of ranks that share the columns of an expert."""
        return self.tp.size // self.ep

    @property
    def adds_expert_bias(self) -> bool:
        """Whether this rank adds the experts' output bias, which one rank of a group does."""
        return self.tp.rank % self.column_ranks == 0

    def expert_columns(self, total: int, what: str) -> Share:
        """An equal share of the columns of this group's experts.

        Raises:
            ConfigError: see `share`.
        """
        size = self.column_ranks
        if self.same_bits and size > 1:
            raise ConfigError(
                "parallel.same_bits: ranks share experts; set parallel.ep="
                f"{self.tp.size}, so that each rank has whole experts"
            )
        if total % size:
            raise ConfigError(f"{what} ({total}) does not divide by {size} ranks")
        return Share(total, total // size * (self.tp.rank % size), total // size)

    def experts(self, total: int, layer: int) -> LayerSlots | None:
        """The experts of a layer in this rank's group; None: every rank has a share of all.

        Raises:
            ConfigError: they do not divide among the groups.
        """
        if self.ep == 1:
            return None
        assert self.placement is not None, "several groups have a placement"
        return self.placement.of_layer(layer, total)

    def query_heads(self, total: int) -> Share:
        """This rank's query heads: an equal share among the ranks that have the same requests.

        Raises:
            ConfigError: they do not divide.
        """
        return _share(self.attention or self.tp, total, "num_attention_heads")

    def heads(self, queries: int, keys: int, what: str = "num_key_value_heads") -> HeadShares:
        """Heads of this rank; with fewer key heads than ranks, several ranks hold the same one.

        Raises:
            ConfigError: query heads do not divide, or ranks would hold parts of heads.
        """
        ranks = self.attention or self.tp
        mine, size = self.query_heads(queries), ranks.size
        if keys < size and size % keys == 0:
            return HeadShares(mine, Share(keys, ranks.rank * keys // size, 1))
        return HeadShares(mine, _share(ranks, keys, what))

    def sharing(self, share: Share) -> Communicator:
        """The ranks that have the other shares of a dimension; `SingleRank` if this one has all."""
        if self.attention is None or share.size * self.tp.size == share.whole:
            return self.tp
        return self.attention

    def partial_sums(self, inputs: Share, what: str) -> int:
        """Number of parts in which this rank sums a product over its share of the inputs.

        Raises:
            ConfigError: the parts of a single rank do not divide among the ranks.
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
        """Rows of a vocabulary: equally many on each rank, except for the last ones."""
        each = -(-total // self.tp.size)
        start = min(each * self.tp.rank, total)
        return Share(total, start, min(each, total - start))

    def over(self, split: Split) -> RowParts | None:
        """The ranks that hold the other columns of rows split this way; None: rows are whole."""
        if self.same_bits and split.is_divided:
            raise ConfigError(
                "parallel.same_bits: norms over whole projections are summed over all ranks, in "
                "another order than on one rank"
            )
        return RowParts(self.sharing(split.shares[0])) if split.is_divided else None


def _share(ranks: Communicator, total: int, what: str) -> Share:
    size = ranks.size
    if total % size:
        raise ConfigError(f"{what} ({total}) does not divide by {size} ranks")
    return Share(total, total // size * ranks.rank, total // size)


def among_experts(mesh: Mesh) -> Mesh:
    """Return the mesh of feed-forward blocks without experts, in models with experts."""
    return mesh if mesh.dense is None else Mesh(mesh.dense, same_bits=mesh.same_bits)


ONE_RANK = Mesh()
