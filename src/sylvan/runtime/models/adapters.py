"""Adapters beside a model: its layers that they may change, and what an adapter puts into each.

Shapes: L rank, K inputs of a layer, N outputs of a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sylvan.kernels.adapters import (
    MAX_PARTS,
    Factors,
    LayerKind,
    LoraLayer,
    Prepared,
    side_by_side,
)
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear, VocabHead
from sylvan.runtime.layers.moe import Experts, Router
from sylvan.runtime.models.checkpoint import Slot, canonical, slots, source_rows
from sylvan.runtime.models.lora import Adapter, LowRank
from sylvan.runtime.models.shards import NOT_SPLIT, Splits, whole_shape
from sylvan.runtime.models.stored import WeightFiles

_HEADS = ("lm_head", "score", "classifier", "embed_out")
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_MERGE = "`sylvan lora merge` puts it into the checkpoint"


@dataclass(frozen=True, slots=True)
class Target:
    """One matrix of the checkpoint: a part of the outputs of a layer."""

    layer: LoraLayer
    number: int  # of the part
    source: str  # name of its tensor, as the model calls it
    splits: Splits  # of that tensor: which share of it this rank has
    kind: LayerKind = "linear"
    factor: float = 1.0  # by which the model multiplies what the layer makes


class Place(Protocol):
    """Makes the place for adapters of a layer."""

    def __call__(
        self, inputs: int, outputs: Sequence[int], *, kind: LayerKind = "linear"
    ) -> LoraLayer:
        """For a layer of so many inputs, and of outputs in these parts."""
        ...


Content = Sequence[tuple[LoraLayer, tuple[Prepared | None, ...]]]
"""What an adapter changes: of each layer, the matrices by part."""


class AdapterTargets:
    """The layers of a model that adapters may change.

    Making one gives each of these layers its place for adapters (`Linear.lora`), so it is to be
    made before the model is recorded or captured.

    Args:
        model: One of our families.
        skeleton: The same without contents, for names and shapes.
        place: Makes the place for adapters of a layer.
        files: The model's checkpoint, to compare tables with that come with adapters; None: there
            is none.

    Attributes:
        layers: All of them.
        head: That of the logits; None: the model has none that adapters may change.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        place: Place,
        files: Callable[[], WeightFiles] | None = None,
    ) -> None:
        self._files = files
        self._rename: Callable[[str], str] = getattr(model, "rename", canonical)
        self._convert: Callable[[str, torch.Tensor], torch.Tensor] = getattr(
            model, "convert", _as_stored
        )
        self._found: dict[str, Target] = {}
        self._others: set[str] = set()
        self._experts: set[str] = set()
        self.layers: list[LoraLayer] = []
        self.head: LoraLayer | None = None
        read = {id(part.kv_b_proj) for part in model.modules() if isinstance(part, LatentAttention)}
        for slot in slots(skeleton):
            self._others.update(slot.sources)
            if isinstance(slot.module, Experts):
                self._experts.update(slot.sources)
            elif _is_target(slot):
                linear = model.get_submodule(slot.name.rpartition(".")[0])
                if isinstance(linear, Linear) and id(linear) not in read:
                    self._add(slot, linear, place)
        self._add_ends(model, {slot.name: slot for slot in slots(skeleton)}, place)

    def _add_ends(self, model: nn.Module, by_name: dict[str, Slot], place: Place) -> None:
        """The table of token ids, and the head, which may be tied to it."""
        table, head = (getattr(model, name, None) for name in (_EMBEDDING, _HEAD))
        slot = by_name.get(f"{_EMBEDDING}.weight")
        if isinstance(table, Embedding) and slot is not None:
            whole = whole_shape(slot.shape, slot.splits)
            table.lora = layer = place(whole[0], (whole[1],), kind="embedding")
            (source,) = slot.sources
            self._found[source] = Target(
                layer, 0, source, NOT_SPLIT, kind="embedding", factor=table.scale
            )
            self.layers.append(layer)
        own = by_name.get(f"{_HEAD}.weight")
        slot = own or slot
        if isinstance(head, VocabHead) and slot is not None:
            head.lora = self.head = layer = place(slot.shape[1], (slot.shape[0],), kind="head")
            source = own.sources[0] if own else self._rename(f"{_HEAD}.weight")
            self._found[source] = Target(layer, 0, source, slot.splits, kind="head")
            self.layers.append(layer)

    def _add(self, slot: Slot, linear: Linear, place: Place) -> None:
        sources = slot.sources
        parts = [source_rows(slot, number) for number in range(len(sources))]
        sizes = [part.stop - part.start for part in parts]
        linear.lora = layer = place(slot.shape[1], sizes)
        self.layers.append(layer)
        for number, source in enumerate(sources):
            self._found[source] = Target(layer, number, source, slot.splits_of(number))

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
        found = self._found.get(source)
        kind = found.kind if found else None
        why = None
        if module.is_embedding != (kind == "embedding"):
            why = "an embedding" if module.is_embedding else "the embedding, as a linear layer"
        elif "base_layer" in module.parts and not self._has_table(
            source, module.parts["base_layer"]
        ):
            why = "whose base, which comes with it, is not the model's (added tokens?)"
        elif source in self._experts or ".experts." in name:
            why = "experts of a mixture"
        elif found is None and any(head in name.split(".") for head in _HEADS):
            why = "the head"
        if why is not None:
            raise ConfigError(
                f"the adapter changes {name!r}, {why}: that cannot be served beside the model; "
                f"{_MERGE}"
            )
        if found is not None:
            return found
        if source in self._others:
            raise ConfigError(
                f"the adapter changes {name!r}, which adapters beside the model cannot change; "
                f"{_MERGE}"
            )
        raise ConfigError(
            f"the adapter changes {name!r}, which the model does not have: it was made for another "
            "model"
        )

    def _has_table(self, source: str, base: torch.Tensor) -> bool:
        """Whether the model's checkpoint has these numbers under this name, or tied ones."""
        if self._files is None:
            return False
        files = self._files()
        names = {self._rename(name): name for name in files.tensors}
        stored = names.get(source) or names.get(f"{_EMBEDDING}.weight")
        if stored is None:
            return False
        mine = files.tensor(stored)
        return mine.shape == base.shape and torch.equal(mine, base.to(mine.dtype))

    def _part(self, adapter: Adapter, name: str, target: Target) -> Prepared:
        module, config = adapter.modules[name], adapter.config
        down, up = module.factors
        is_turned = config.fan_in_fan_out and target.kind == "linear"
        converted = up.T if is_turned else up
        if target.kind == "linear":
            converted = self._convert(target.source, converted)
        elif self._convert(target.source, up) is not up:
            raise ConfigError(
                f"the adapter changes {name!r}, which the model computes with in "
                f"another form: that cannot be served beside the model; {_MERGE}"
            )
        if is_turned and converted.shape == up.T.shape != up.shape:
            converted = converted.T  # stored like other matrices after all
        shape = list(converted.shape[:1]) + list(down.shape[1:])
        mine = target.layer.outputs[target.number], target.layer.inputs
        wanted = list(whole_shape(mine, target.splits))
        if shape != wanted or converted.dim() != 2:
            raise ConfigError(
                f"the adapter changes {name!r} as a matrix of {shape}, but the model's is "
                f"{wanted}: it was made for another model"
            )
        down, up = _share(down, target.splits, -1), _share(converted, target.splits, -2)
        scale = config.scale(name, module.rank) * target.factor
        return target.layer.prepare(Factors(down, up, scale))


def _share(matrix: torch.Tensor, splits: Splits, dim: int) -> torch.Tensor:
    """What this rank needs of a matrix of an adapter, which is divided as the model's is."""
    return splits[dim].take(matrix, dim) if dim in splits else matrix


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
