"""Attention data parallelism: groups of ranks attend for different requests of a step.

Each group keeps the KV of its own requests only. An attention layer computes the rows of these
requests and gathers the outputs of all groups, so every rank has all rows for the other layers,
which are sharded over all ranks as usual. A group without requests in a step only takes part in
gathering.

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
    """The groups, and this rank's group.

    Attributes:
        ranks: All ranks, group by group.
        group_size: Ranks per group; they share the heads.
        group: Number of this rank's group.
    """

    ranks: Communicator
    group_size: int
    group: int

    def attend(self, attention: Callable[[X, ForwardBatch], X], x: X, batch: ForwardBatch) -> X:
        """Compute attention for all rows, each on the group that has its request.

        Args:
            attention: Computes the rows of a batch. Shape: (T, D) -> (T, D), the same on all ranks
                of the group.
            x: (T, D).
            batch: The batch, with `local`.

        Raises:
            Unsupported: x is traced: PyTorch computes this layer between the parts of a program.
            RankLostError: Another rank has exited.
        """
        if isinstance(x, TracedTensor):
            raise Unsupported("attention data parallelism")
        local = batch.local
        assert local is not None, "the executor of such a rank says which rows it has"
        given_GD = x.new_zeros(local.max_rows, x.shape[1])
        if local.batch.num_tokens:
            compute: Any = attention  # of tensors, as x is one
            out: torch.Tensor = compute(x[local.rows], local.batch)
            given_GD[: len(out)] = out
        found = self.ranks.all_gather(given_GD)[:: self.group_size]
        return cast("X", found.flatten(0, 1)[local.places_T])
