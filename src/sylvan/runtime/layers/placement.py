"""Placement of experts on groups of ranks (expert parallelism).

All groups have the same number of slots, and a slot holds one expert. Redundant slots hold copies
of the busiest experts. Balancing follows DeepSeek's EPLB (github.com/deepseek-ai/EPLB).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError

_Rows = TypeVar("_Rows")
Loads = Mapping[int, Sequence[float]]
"""Rows of each expert, by layer number."""


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """Slots of one layer.

    Attributes:
        experts: The expert in each slot; the slots of group g begin at g * per_group.
        num_experts: Number of experts.
        per_group: Slots per group.
    """

    experts: tuple[int, ...]
    num_experts: int
    per_group: int

    def of_group(self, group: int) -> tuple[int, ...]:
        """The experts of a group, in slot order."""
        return self.experts[group * self.per_group : (group + 1) * self.per_group]

    @property
    def max_copies(self) -> int:
        """Maximum number of slots with the same expert."""
        return max(np.bincount(self.experts))

    def table(self, width: int) -> IntArray:
        """Slots of each expert, padded by repetition. Shape: (E, width)."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        return np.array([[own[i % len(own)] for i in range(width)] for own in slots], np.int32)


@dataclass(slots=True)
class ExpertPlacement:
    """The placement in all layers; identical on every rank.

    Attributes:
        groups: Number of groups.
        copies: Redundant slots per layer.
        given: Experts of the slots, by layer number; other layers hold experts in order.
    """

    groups: int
    copies: int = 0
    given: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])

    def of_layer(self, layer: int, num_experts: int) -> LayerSlots:
        """Slots of a layer.

        Raises:
            ConfigError: they do not divide among the groups, or do not match the layer.
        """
        slots, groups = self._num_slots(num_experts), self.groups
        found = self.given.get(layer)
        if found is None:
            found = _in_order(num_experts, slots, groups)
        elif len(found) != slots or {*found} != {*range(num_experts)}:
            raise ConfigError(
                f"parallel.expert_placement: layer {layer} has {num_experts} experts in {slots} "
                f"slots, and the file has {len({*found})} in {len(found)}"
            )
        return LayerSlots(found, num_experts, slots // groups)

    def balance(self, loads: Loads) -> None:
        """Place the experts of these layers so that groups get about equal load.

        Raises:
            ConfigError: they do not divide among the groups.
        """
        for layer, load in loads.items():
            self._num_slots(len(load))
            self.given[layer] = balanced(load, self.copies, self.groups)

    def _num_slots(self, num_experts: int) -> int:
        slots, groups = num_experts + self.copies, self.groups
        if slots % groups:
            copies = f" and {self.copies} copies" if self.copies else ""
            raise ConfigError(
                f"parallel.ep={groups}: {num_experts} experts{copies} do not divide into {groups} "
                f"groups; parallel.redundant_experts={-num_experts % groups} adds the missing "
                "copies"
            )
        if self.copies > num_experts * (groups - 1):
            raise ConfigError(
                f"parallel.redundant_experts={self.copies}: {groups} groups can use at most "
                f"{num_experts * (groups - 1)}"
            )
        return slots


def balance_of(slots: LayerSlots, load: Sequence[float]) -> float:
    """Mean load of a group divided by that of the busiest group: 1 if all are equal."""
    counts = np.bincount(slots.experts, minlength=slots.num_experts)
    rows = np.asarray(load, float)[list(slots.experts)] / counts[list(slots.experts)]
    work = rows.reshape(-1, slots.per_group).sum(1)
    return float(work.mean() / work.max()) if work.max() > 0 else 1.0


def balanced(load: Sequence[float], copies: int, groups: int) -> tuple[int, ...]:
    """Choose the expert of each slot so that groups get about equal load.

    Args:
        load: Rows of each expert.
        copies: Redundant slots; the busiest experts get them.
        groups: Number of groups, which share the slots evenly.
    """
    counts = [1] * len(load)
    busiest = [(-float(rows), expert) for expert, rows in enumerate(load)]
    heapq.heapify(busiest)
    for _ in range(copies):
        _, expert = heapq.heappop(busiest)
        counts[expert] += 1
        if counts[expert] < groups:  # a second copy in a group is useless
            heapq.heappush(busiest, (-float(load[expert]) / counts[expert], expert))
    pieces = sorted(
        ((load[e] / counts[e], e) for e in range(len(load)) for _ in range(counts[e])),
        key=lambda piece: (-piece[0], piece[1]),
    )
    return _packed(pieces, groups)


def _packed(pieces: Sequence[tuple[float, int]], groups: int) -> tuple[int, ...]:
    """Assign the largest first, each to the least loaded group that has room."""
    room, work = len(pieces) // groups, [0.0] * groups
    held: list[list[int]] = [[] for _ in range(groups)]
    for rows, expert in pieces:
        free = [g for g in range(groups) if len(held[g]) < room]
        fresh = [g for g in free if expert not in held[g]] or free
        group = min(fresh, key=lambda g: (work[g], g))
        held[group].append(expert)
        work[group] += rows
    _remove_duplicates(held)
    return tuple(expert for own in held for expert in sorted(own))


def _remove_duplicates(held: Sequence[list[int]]) -> None:
    """Swap experts that a group holds twice with those of other groups, in place."""
    for own in held:
        for expert in {e for e in own if own.count(e) > 1}:
            for other in held:
                if expert in other:
                    continue
                swapped = next((e for e in other if e not in own), None)
                if swapped is not None:
                    own[own.index(expert)] = swapped
                    other[other.index(swapped)] = expert
                    break


def _in_order(num_experts: int, slots: int, groups: int) -> tuple[int, ...]:
    """Experts in order; copies are of the first ones, placed in other groups."""
    if slots == num_experts:
        return tuple(range(num_experts))
    return balanced([1.0] * num_experts, slots - num_experts, groups)


def read_placement(path: Path | None, groups: int, copies: int) -> ExpertPlacement:
    """The placement in a JSON file, or the one that balances the loads in it.

    The file has `physical_to_logical_map` (the expert of each slot), or `logical_count` or
    `expert_load` (rows of each expert), by layer: a list for all layers, or an object with layer
    numbers or names as keys.

    Args:
        path: The file; None for experts in order.
        groups: See `ExpertPlacement`.
        copies: See `ExpertPlacement`.

    Raises:
        ConfigError: the file has none of these.
    """
    placement = ExpertPlacement(groups, copies)
    if path is None:
        return placement
    where = f"parallel.expert_placement={path}"
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected an object")
    slots = content.get("physical_to_logical_map")
    loads = content.get("logical_count", content.get("expert_load"))
    if slots is not None:
        for layer, experts in _by_layer(slots, where, list[int]).items():
            placement.given[layer] = tuple(experts)
    elif loads is not None:
        placement.balance(_by_layer(loads, where, list[float]))
    else:
        names = "physical_to_logical_map, logical_count or expert_load"
        raise ConfigError(f"{where}: expected one of {names}")
    return placement


def _by_layer(found: Any, where: str, kind: type[_Rows]) -> dict[int, _Rows]:
    try:
        if isinstance(found, list):
            return dict(enumerate(msgspec.convert(found, list[kind])))
        named = msgspec.convert(found, dict[str, kind])
        return {_number_of(layer): row for layer, row in named.items()}
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _number_of(layer: str) -> int:
    """The number in a layer's name, such as `layers.3.mlp`."""
    found = re.search(r"\d+", layer)
    if found is None:
        raise ValueError(f"{layer!r} has no layer number")
    return int(found[0])
