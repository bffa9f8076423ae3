"""Moves experts between groups of ranks during serving.

All ranks count the same rows, so each reaches the same decision alone. Answers do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.api import ExpertRanks
from sylvan.protocol.commands import BalanceExperts
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.layers.moe import Experts
from sylvan.runtime.layers.placement import LayerSlots, balance_of, balanced
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.slots import Slot
from sylvan.runtime.models.stored import WeightFiles

_MIN_GAIN = 0.01
"""Minimum gain in balance for which a layer's experts are moved."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts: rows per expert so far, int64 (E,), their ranks, and their weights."""

    load: torch.Tensor
    expert_ranks: ExpertRanks
    experts: Experts


class ExpertMover:
    """Handles `BalanceExperts` on one rank.

    Args:
        mesh: The ranks; its placement is updated.
        layers: Layers of experts, by number.
        weights: Receives the moved experts.
        files: Opens the served checkpoint; raises ConfigError if there is none.
    """

    def __init__(
        self,
        mesh: Mesh,
        layers: Mapping[int, ExpertLayer],
        weights: LiveWeights,
        files: Callable[[], WeightFiles],
    ) -> None:
        assert mesh.placement is not None, "there are several groups"
        self._placement = mesh.placement
        self._layers, self._weights, self._files = dict(layers), weights, files
        self._seen = {layer: found.load.clone() for layer, found in layers.items()}

    def run(self, command: BalanceExperts) -> dict[str, Any]:
        """See `BalanceExperts`.

        Raises:
            ConfigError: the weights do not come from a checkpoint, or adapters change the experts.
            ExecutorError: the checkpoint changed on disk; the weights are now inconsistent.
        """
        if any(layer.experts.lora is not None for layer in self._layers.values()):
            raise ConfigError("experts cannot be moved while LoRA adapters may change them")
        planned, before, after = self._planned()
        moved = sum(_moves(self._slots(layer), experts) for layer, experts in planned.items())
        if planned:
            self._move(planned)
        self._seen = {layer: found.load.clone() for layer, found in self._layers.items()}
        return {"moved": moved, "before": round(before, 4), "after": round(after, 4)}

    def _slots(self, layer: int) -> LayerSlots:
        return self._placement.of_layer(layer, len(self._layers[layer].load))

    def _planned(self) -> tuple[dict[int, tuple[int, ...]], float, float]:
        """Plan placements with a better balance; return them, and the balance before and after."""
        planned: dict[int, tuple[int, ...]] = {}
        before: list[float] = []
        after: list[float] = []
        for layer, found in self._layers.items():
            load = (found.load - self._seen[layer]).tolist()
            now = self._slots(layer)
            experts = balanced(load, self._placement.copies, self._placement.groups)
            better = LayerSlots(experts, now.num_experts, now.per_group)
            old, new = balance_of(now, load), balance_of(better, load)
            if new > old + _MIN_GAIN:
                planned[layer] = experts
            before.append(old)
            after.append(new if layer in planned else old)
        count = max(1, len(before))
        return planned, sum(before) / count, sum(after) / count

    def _move(self, planned: Mapping[int, tuple[int, ...]]) -> None:
        """Load experts into their new slots, then route rows there."""
        files = self._files()
        kept = dict(self._placement.given)
        self._placement.given.update(planned)

        def is_moved(slot: Slot) -> bool:
            return isinstance(slot.module, Experts) and slot.module.layer in planned

        try:
            self._weights.reload(files, is_moved)
        except ConfigError:
            self._placement.given.clear()
            self._placement.given.update(kept)
            self._weights.index()
            raise
        for layer in planned:
            table = self._layers[layer].expert_ranks.slots_EC
            table.copy_(torch.from_numpy(self._slots(layer).table(table.shape[1])))


def _moves(now: LayerSlots, experts: tuple[int, ...]) -> int:
    """Number of experts that are new to a group."""
    then = LayerSlots(experts, now.num_experts, now.per_group)
    groups = range(len(experts) // now.per_group)
    return sum(len({*then.of_group(g)} - {*now.of_group(g)}) for g in groups)
