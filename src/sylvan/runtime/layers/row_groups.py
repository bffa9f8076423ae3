"""Attention data parallelism: groups of ranks attend for different requests of a step.

Each group keeps the KV of its own requests alone. An attention layer takes the rows of these
requests, and the outputs of all groups are gathered, so that every rank has all rows of the layers
between: experts and other layers are divided among all ranks as ever. A group that has no request
in a step only takes part in gathering.

Shapes: T rows of the step, G rows of the group with the most, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from sylvan.kernels.api import Communicator, TracedTensor, Unsupported, X
from sylvan.runtime.core.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The groups, and this rank's place.

    Attributes:
        ranks: All ranks, group by group.
        group_size: Ranks of a group; they share the heads.
        group: Of this rank.
    """

    ranks: Communicator
    group_size: int
    group: int

    def attend(self, attention: Callable[[X, ForwardBatch], X], x: X, batch: ForwardBatch) -> X:
        """What attention makes of all rows, each of them computed by the group that has it.

        Args:
            attention: Computes the rows of a batch. Shape: (T, D) -> (T, D), the same on all ranks
                of the group.
            x: (T, D).
            batch: With `own`.

        Raises:
            Unsupported: x is traced; PyTorch computes this layer between the parts of a program.
            RankLostError: another rank has ended.
        """
        if isinstance(x, TracedTensor):
            raise Unsupported("attention of which each rank has some requests")
        own = batch.own
        assert own is not None, "the executor of such a rank says which rows it has"
        given_GD = x.new_zeros(own.most_rows, x.shape[1])
        if own.batch.num_tokens:
            compute: Any = attention  # of tensors, as x is one
            out: torch.Tensor = compute(x[own.rows], own.batch)
            given_GD[: len(out)] = out
        found = self.ranks.all_gather(given_GD)[:: self.group_size]
        return cast("X", found.flatten(0, 1)[own.places_T])
