"""Which parameters of a model that is not ours lie in what kernels packed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.copies import WeightCopy
from sylvan.runtime.models.holders import CopyHolder, Holder, RowsHolder


class Origins:
    """Made of a model before its weights are packed: from then on they are not known by identity.

    Attributes:
        lost: Parameters that are packed in a form which takes no others.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(value): name for name, value in model.named_parameters()}
        # By key: what was packed, and the parameters that are below each other in it.
        self._parts: dict[object, tuple[object, list[tuple[str, int]]]] = {}
        self.lost: set[str] = set()

    def note(self, packed: DeferredWeight | torch.Tensor, *parameters: torch.Tensor) -> None:
        """`packed` is to be packed, and has these parameters below each other."""
        parts = [(self._names[id(value)], value.shape[0]) for value in parameters]
        self._parts[_key(packed)] = packed, parts

    def lose(self, module: nn.Module) -> None:
        """Other copies are made of the parameters of `module`."""
        known = (self._names.get(id(value)) for value in module.parameters())
        self.lost |= {name for name in known if name is not None}

    def holders(self, copies: Sequence[WeightCopy]) -> Mapping[str, Sequence[Holder]]:
        """What keeps contents of each parameter that was packed."""
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
