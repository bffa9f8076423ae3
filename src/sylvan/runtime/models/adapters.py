"""Adapters beside a model: its layers that they may change, and what an adapter puts into each.

Shapes: L rank, K inputs of a layer, N outputs of a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sylvan.kernels.adapters import MAX_PARTS, Factors, LoraLayer, Prepared, side_by_side
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.moe import Experts, Router
from sylvan.runtime.models.checkpoint import Slot, canonical, slots, source_rows
from sylvan.runtime.models.lora import Adapter, LowRank

_HEADS = ("lm_head", "score", "classifier", "embed_out")
_MERGE = "`sylvan lora merge` puts it into the checkpoint"


@dataclass(frozen=True, slots=True)
class Target:
    """One matrix of the checkpoint: a part of the outputs of a layer."""

    layer: LoraLayer
    linear: Linear
    number: int  # of the part
    source: str  # name of its tensor, as the model calls it


Content = Sequence[tuple[LoraLayer, tuple[Prepared | None, ...]]]
"""What an adapter changes: of each layer, the matrices by part."""


class AdapterTargets:
    """The layers of a model that adapters may change.

    Making one gives each of these layers its place for adapters (`Linear.lora`), so it is to be
    made before the model is recorded or captured.

    Args:
        model: One of our families.
        skeleton: The same without contents, for names and shapes.
        place: Makes the place for adapters of a layer, by its inputs and the outputs of each part.

    Attributes:
        layers: All of them.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        place: Callable[[int, Sequence[int]], LoraLayer],
    ) -> None:
        self._rename: Callable[[str], str] = getattr(model, "rename", canonical)
        self._convert: Callable[[str, torch.Tensor], torch.Tensor] = getattr(
            model, "convert", _as_stored
        )
        self._found: dict[str, Target] = {}
        self._others: set[str] = set()
        self._experts: set[str] = set()
        self.layers: list[LoraLayer] = []
        read = {id(part.kv_b_proj) for part in model.modules() if isinstance(part, LatentAttention)}
        for slot in slots(skeleton):
            self._others.update(slot.sources)
            if isinstance(slot.module, Experts):
                self._experts.update(slot.sources)
            elif _is_target(slot):
                linear = model.get_submodule(slot.name.rpartition(".")[0])
                if isinstance(linear, Linear) and id(linear) not in read:
                    self._add(slot, linear, place)

    def _add(
        self, slot: Slot, linear: Linear, place: Callable[[int, Sequence[int]], LoraLayer]
    ) -> None:
        sources = slot.sources
        parts = [source_rows(slot, number) for number in range(len(sources))]
        sizes = [part.stop - part.start for part in parts]
        linear.lora = layer = place(slot.shape[1], sizes)
        self.layers.append(layer)
        for number, source in enumerate(sources):
            self._found[source] = Target(layer, linear, number, source)

    def prepare(self, adapter: Adapter, max_rank: int) -> Content:
        """What an adapter changes, checked, in the form in which it is kept beside the model.

        Raises:
            ConfigError: it cannot be served beside this model; names the module and the reason.
        """
        _check_kind(adapter)
        found: dict[int, list[Prepared | None]] = {}
        layers: dict[int, LoraLayer] = {}
        for name, module in adapter.modules.items():
            target = self._target(name, module)
            if module.rank > max_rank:
                raise ConfigError(
                    f"the adapter changes {name!r} by rank {module.rank}; lora.max_rank is "
                    f"{max_rank}"
                )
            layer = target.layer
            parts = found.setdefault(id(layer), [None] * len(layer.outputs))
            layers[id(layer)] = layer
            parts[target.number] = self._part(adapter, name, target)
        placed = side_by_side(list(found.values()))
        return [(layers[key], parts) for key, parts in zip(found, placed, strict=True)]

    def _target(self, name: str, module: LowRank) -> Target:
        source = self._rename(f"{name}.weight")
        why = None
        if module.is_embedding:
            why = "an embedding"
        elif "base_layer" in module.parts:
            why = "a matrix whose base was stored as well"
        elif source in self._experts or ".experts." in name:
            why = "experts of a mixture"
        elif source not in self._found and any(head in name.split(".") for head in _HEADS):
            why = "the head"
        if why is not None:
            raise ConfigError(
                f"the adapter changes {name!r}, {why}: that cannot be served beside the model; "
                f"{_MERGE}"
            )
        if (target := self._found.get(source)) is not None:
            return target
        if source in self._others:
            raise ConfigError(
                f"the adapter changes {name!r}, which adapters beside the model cannot change; "
                f"{_MERGE}"
            )
        raise ConfigError(
            f"the adapter changes {name!r}, which the model does not have: it was made for another "
            "model"
        )

    def _part(self, adapter: Adapter, name: str, target: Target) -> Prepared:
        module, config = adapter.modules[name], adapter.config
        down, up = module.parts["lora_A"], module.parts["lora_B"]
        converted = self._convert(target.source, up.T if config.fan_in_fan_out else up)
        if config.fan_in_fan_out and converted.shape == up.T.shape != up.shape:
            converted = converted.T  # stored like other matrices after all
        shape = list(converted.shape[:1]) + list(down.shape[1:])
        wanted = [target.layer.outputs[target.number], target.layer.inputs]
        if [converted.shape[0], down.shape[1]] != wanted or converted.dim() != 2:
            raise ConfigError(
                f"the adapter changes {name!r} as a matrix of {shape}, but the model's is "
                f"{wanted}: it was made for another model"
            )
        return target.layer.prepare(Factors(down, converted, config.scale(name, module.rank)))


def _is_target(slot: Slot) -> bool:
    linear, head = slot.module, slot.name.split(".")
    return (
        isinstance(linear, Linear)
        and not isinstance(linear, Router)
        and slot.attribute == "weight"
        and len(slot.sources) <= MAX_PARTS
        and not any(part in head for part in _HEADS)
        and "layers" in head
    )


def _check_kind(adapter: Adapter) -> None:
    lacking = ""
    if adapter.config.use_dora:
        lacking = "it is a DoRA adapter (use_dora)"
    elif adapter.whole:
        lacking = f"it brings {next(iter(adapter.whole))!r} as a whole (modules_to_save)"
    if lacking:
        raise ConfigError(f"the adapter cannot be served beside the model: {lacking}; {_MERGE}")


def _as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    del name
    return tensor


def num_bytes(content: Content) -> int:
    """Memory of an adapter's matrices."""
    return sum(part.num_bytes for _, parts in content for part in parts if part is not None)
