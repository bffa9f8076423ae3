"""Tracks which packed weights hold which parameters of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.copies import WeightCopy
from sylvan.runtime.models.holders import CopyHolder, Holder, RowsHolder


class Origins:
    """Records a model's parameters before packing, which destroys their identity.

    Attributes:
        lost: Parameters whose packed form cannot be updated.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(value): name for name, value in model.named_parameters()}
        # By key: the packed weight, and the parameters stacked in it.
        self._parts: dict[object, tuple[object, list[tuple[str, int]]]] = {}
        self.lost: set[str] = set()

    def note(self, packed: DeferredWeight | torch.Tensor, *parameters: torch.Tensor) -> None:
        """Record that `packed` is packed from these parameters, stacked by rows."""
        parts = [(self._names[id(value)], value.shape[0]) for value in parameters]
        self._parts[_key(packed)] = packed, parts

    def lose(self, module: nn.Module) -> None:
        """Record that other copies of the parameters of `module` exist."""
        known = (self._names.get(id(value)) for value in module.parameters())
        self.lost |= {name for name in known if name is not None}

    def holders(self, copies: Sequence[WeightCopy]) -> Mapping[str, Sequence[Holder]]:
        """The packed copies of each packed parameter."""
        found: dict[str, list[Holder]] = {}
        for copy in copies:
            _, parts = self._parts.get(_key(copy.source), (None, []))
            row = 0
            for name, count in parts:
                alone = len(parts) == 1
                holder = CopyHolder(copy) if alone else RowsHolder(copy, row, count)
                found.setdefault(name, []).append(holder)
                row += count
        return found


def _key(packed: object) -> object:
    return packed.key if isinstance(packed, DeferredWeight) else id(packed)
