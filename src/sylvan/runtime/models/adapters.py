"""LoRA targets of a model: the layers that adapters may change, and the matrices of each.

Shapes: L rank, K inputs of a layer, N outputs of a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from sylvan.kernels.adapters import (
    MAX_PARTS,
    Factors,
    LayerKind,
    LoraLayer,
    LoraShape,
    Prepared,
    side_by_side,
)
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear, VocabHead
from sylvan.runtime.layers.mesh import IndexSelection
from sylvan.runtime.layers.moe import Experts, Router
from sylvan.runtime.models import lora_experts
from sylvan.runtime.models.checkpoint import check_finite
from sylvan.runtime.models.lora import Adapter, LowRank
from sylvan.runtime.models.lora_config import AdapterConfig
from sylvan.runtime.models.shards import NOT_SPLIT, Splits, expert_selection, of_source, whole_shape
from sylvan.runtime.models.slots import Slot, slots, source_rows
from sylvan.runtime.models.stored import WeightFiles
from sylvan.runtime.models.text_parts import canonical

_HEADS = ("lm_head", "score", "classifier", "embed_out")
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_MERGE = "merge it into the checkpoint with `sylvan lora merge`"


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A checkpoint matrix that adapters change: part of the outputs of a layer or of an expert."""

    layer: LoraLayer
    number: int  # index of the part among the parts of all experts
    source: str  # the model's name of its tensor
    splits: Splits  # how ranks shard that tensor
    kind: LayerKind = "linear"
    factor: float = 1.0  # the model's own multiplier of the layer's output
    here: bool = True  # False: held by other ranks, so it is only validated here

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole matrix over all ranks."""
        layer = self.layer
        mine = layer.outputs[self.number % len(layer.outputs)], layer.inputs
        outputs, inputs = whole_shape(mine, self.splits)
        return outputs, inputs


MakeLoraLayer = Callable[[LoraShape], LoraLayer]
"""Creates the adapter slot of a layer."""

Content = Sequence[tuple[LoraLayer, tuple[Prepared | None, ...]]]
"""Changes made by an adapter: by layer, the matrices by part."""


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """This rank's part of an adapter; `num_bytes` includes other experts and stages."""

    content: Content
    num_bytes: int


class AdapterTargets:
    """The layers of a model that adapters may change.

    The constructor adds an adapter slot to each of these layers (`Linear.lora`), so call it before
    the model is traced or captured.

    Args:
        model: A native model, or the layers of a pipeline stage.
        skeleton: The whole model without weights, for names and shapes.
        make_layer: Creates the adapter slot of a layer.
        files: The model's checkpoint, to compare with base tables that adapters include; None if
          there is none.

    Attributes:
        layers: All target layers.
        head: The target for logits; None if adapters cannot change the head.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        make_layer: MakeLoraLayer,
        files: Callable[[], WeightFiles] | None = None,
    ) -> None:
        self._files = files
        self._rename: Callable[[str], str] = getattr(model, "rename", canonical)
        self._convert: Callable[[str, torch.Tensor], torch.Tensor] = getattr(
            model, "convert", _as_stored
        )
        self._found: dict[str, AdapterTarget] = {}
        self._others: set[str] = set()
        self._divided: set[str] = set()  # expert stacks that are divided among ranks
        self._stacks: dict[str, list[list[AdapterTarget]]] = {}  # stacks of each mixture, by path
        self._paths: dict[str, str] = {}  # paths of mixtures, by checkpoint name
        self.layers: list[LoraLayer] = []
        self.head: LoraLayer | None = None
        whole = skeleton.modules()
        read = {id(part.kv_b_proj) for part in whole if isinstance(part, LatentAttention)}
        for slot in slots(skeleton):
            self._others.update(slot.sources)
            here = held(model, slot.name.rpartition(".")[0])
            if isinstance(slot.module, Experts):
                self._add_stack(slot, make_layer, here=here is not None)
            elif _is_target(slot) and id(slot.module) not in read:
                self._add(slot, here if isinstance(here, Linear) else None, make_layer)
        for path, (into, out_of) in self._stacks.items():
            if isinstance(experts := held(model, path), Experts):
                experts.lora = into[0].layer, out_of[0].layer
        self._add_ends(model, skeleton, make_layer)

    def _add_ends(self, model: nn.Module, skeleton: nn.Module, make_layer: MakeLoraLayer) -> None:
        """Add the token embedding and the head, which may be tied to it."""
        by_name = {slot.name: slot for slot in slots(skeleton)}
        table, head = (getattr(skeleton, name, None) for name in (_EMBEDDING, _HEAD))
        slot = by_name.get(f"{_EMBEDDING}.weight")
        if isinstance(table, Embedding) and slot is not None:
            whole = whole_shape(slot.shape, slot.splits)
            layer, here = make_layer(LoraShape(whole[0], (whole[1],), "embedding")), False
            if isinstance(own := held(model, _EMBEDDING), Embedding):
                own.lora, here = layer, True
                self.layers.append(layer)
            (source,) = slot.sources
            self._found[source] = AdapterTarget(
                layer, 0, source, NOT_SPLIT, kind="embedding", factor=table.scale, here=here
            )
        separate = by_name.get(f"{_HEAD}.weight")
        slot = separate or slot
        if isinstance(head, VocabHead) and slot is not None:
            layer, here = make_layer(LoraShape(slot.shape[1], (slot.shape[0],), "head")), False
            if isinstance(own := held(model, _HEAD), VocabHead):
                own.lora, self.head, here = layer, layer, True
                self.layers.append(layer)
            source = separate.sources[0] if separate else self._rename(f"{_HEAD}.weight")
            self._found[source] = AdapterTarget(
                layer, 0, source, slot.splits, kind="head", here=here
            )

    def _add(self, slot: Slot, linear: Linear | None, make_layer: MakeLoraLayer) -> None:
        sources = slot.sources
        parts = [source_rows(slot, number) for number in range(len(sources))]
        sizes = [part.stop - part.start for part in parts]
        layer = make_layer(LoraShape(slot.shape[1], tuple(sizes)))
        if linear is not None:
            linear.lora = layer
            self.layers.append(layer)
        for number, source in enumerate(sources):
            splits, here = slot.splits_of(number), linear is not None
            self._found[source] = AdapterTarget(layer, number, source, splits, here=here)

    def _add_stack(self, slot: Slot, make_layer: MakeLoraLayer, *, here: bool) -> None:
        """Add all experts of a layer; each matrix is also named alone if the checkpoint does so."""
        path, _, attribute = slot.name.rpartition(".")
        if attribute not in ("gate_up_proj", "down_proj"):
            return
        own = expert_selection(slot.splits)
        if own is not None and not slot.by_expert:
            self._divided.update(slot.sources)
            return
        count, outputs, inputs = slot.shape
        has_names = slot.by_expert
        parts = (
            len(slot.sources) // count if has_names else (2 if attribute == "gate_up_proj" else 1)
        )
        shape = LoraShape(inputs, (outputs // parts,) * parts, num_experts=count)
        layer = make_layer(shape)
        if here:
            self.layers.append(layer)
        targets: list[AdapterTarget] = []
        for number in range(count * parts):
            source = slot.sources[number] if has_names else slot.sources[0]
            splits = slot.splits_of(number) if has_names else of_source(slot.splits, number, parts)
            targets.append(AdapterTarget(layer, number, source, splits, here=here))
        if own is not None:
            targets = _of_all_experts(targets, own, slot.elsewhere, parts)
        if has_names:
            self._found.update({target.source: target for target in targets})
        self._stacks.setdefault(path, []).append(targets)
        self._paths[slot.sources[0].partition(".experts.")[0] + ".experts"] = path

    def prepare(self, adapter: Adapter, max_rank: int) -> PreparedAdapter:
        """Validate an adapter and convert it to its in-memory form.

        Parts that other ranks hold are validated, too, so that all ranks accept or reject it.

        Raises:
            ConfigError: the model cannot serve the adapter; names the module and the reason.
        """
        _check_kind(adapter)
        elsewhere, packed = 0, any(layer.packed for layer in self.layers)
        found: dict[int, list[Prepared | None]] = {}
        layers: dict[int, LoraLayer] = {}
        for name, module, target in self._changes(adapter):
            if module.rank > max_rank:
                raise ConfigError(
                    f"the adapter changes {name!r} by rank {module.rank}; lora.max_rank is "
                    f"{max_rank}"
                )
            layer = target.layer
            if not target.here:
                layer.packed |= packed  # as on the ranks that hold it
                elsewhere += self._part(adapter.config, name, module, target).num_bytes
                continue
            parts = found.setdefault(id(layer), [None] * layer.shape.num_parts)
            layers[id(layer)] = layer
            if parts[target.number] is not None:
                raise ConfigError(f"the adapter changes {name!r} twice, under different names")
            parts[target.number] = self._part(adapter.config, name, module, target)
        placed = side_by_side(list(found.values()))
        content = [(layers[key], parts) for key, parts in zip(found, placed, strict=True)]
        return PreparedAdapter(content, num_bytes(content) + elsewhere)

    def _changes(self, adapter: Adapter) -> Iterator[tuple[str, LowRank, AdapterTarget]]:
        for name, module in adapter.modules.items():
            path = canonical(lora_experts.path_of(name))
            stacks = self._stacks.get(self._paths.get(path, path))
            if adapter.config.target_parameters and stacks:
                yield from self._of_stack(name, module, stacks)
            else:
                yield name, module, self._target(name, module)

    def _of_stack(
        self, name: str, module: LowRank, stacks: Sequence[Sequence[AdapterTarget]]
    ) -> Iterator[tuple[str, LowRank, AdapterTarget]]:
        """Split the change of a stack into changes of experts; its shape identifies the layout."""
        if not all(self._keeps(stack) for stack in stacks):
            raise ConfigError(
                f"the adapter changes {name!r}, a stack of experts that the model stores in "
                f"another order and cannot change at run time; {_MERGE}"
            )
        down, up = module.factors
        for stack in stacks:
            layer = stack[0].layer
            parts = len(layer.outputs)
            count = len(stack) // parts
            each, inputs = stack[0].shape
            if (up.shape[0], down.shape[1]) != (each * parts, inputs) or len(down) % count:
                continue
            changes = lora_experts.split(module, count, parts)
            every = (own for of_expert in changes for own in of_expert)
            for target, own in zip(stack, every, strict=True):
                yield name, own, target
            return
        raise ConfigError(
            f"the adapter changes {name!r} as a stack of matrices of {[len(up), down.shape[1]]}, "
            "which the model does not have: it was made for another model"
        )

    def _keeps(self, stack: Sequence[AdapterTarget]) -> bool:
        """Whether the model stores a stack in transformers' layout."""
        first = stack[0]
        if first.source in self._found:
            return True  # the checkpoint stores experts one by one
        shape = first.layer.shape
        outputs, inputs = first.shape
        stored = torch.empty(shape.num_experts, outputs * len(shape.outputs), inputs, device="meta")
        return self._convert(first.source, stored) is stored

    def _target(self, name: str, module: LowRank) -> AdapterTarget:
        source = self._rename(f"{name}.weight")
        found = self._found.get(source)
        kind = found.kind if found else None
        why = None
        if module.is_embedding != (kind == "embedding"):
            why = "an embedding" if module.is_embedding else "the embedding, as a linear layer"
        elif "base_layer" in module.parts and not self._has_table(
            source, module.parts["base_layer"]
        ):
            why = "whose base matrix, which it includes, differs from the model's (added tokens?)"
        elif source in self._divided:
            why = "a stack of experts that is divided among ranks (parallel.ep)"
        elif found is None and ".experts." in name:
            why = "experts that the checkpoint stores as a stack"
        elif found is None and any(head in name.split(".") for head in _HEADS):
            why = "the head"
        if why is not None:
            raise ConfigError(
                f"the adapter changes {name!r}, {why}, which cannot be applied at run time; "
                f"{_MERGE}"
            )
        if found is not None:
            return found
        if source in self._others:
            raise ConfigError(
                f"the adapter changes {name!r}, which cannot be applied at run time; {_MERGE}"
            )
        raise ConfigError(
            f"the adapter changes {name!r}, which the model does not have: it was made for another "
            "model"
        )

    def _has_table(self, source: str, base: torch.Tensor) -> bool:
        """Whether the model's checkpoint has these numbers under this name or a tied one."""
        if self._files is None:
            return False
        files = self._files()
        names = {self._rename(name): name for name in files.tensors}
        stored = names.get(source) or names.get(f"{_EMBEDDING}.weight")
        if stored is None:
            return False
        mine = files.tensor(stored)
        return mine.shape == base.shape and torch.equal(mine, base.to(mine.dtype))

    def _part(
        self, config: AdapterConfig, name: str, module: LowRank, target: AdapterTarget
    ) -> Prepared:
        down, up = module.factors
        is_transposed = config.fan_in_fan_out and target.kind == "linear"
        converted = up.T if is_transposed else up
        if target.kind == "linear" and target.source in self._found:
            converted = self._convert(target.source, converted)
        elif self._convert(target.source, up) is not up:
            raise ConfigError(
                f"the adapter changes {name!r}, which the model stores in another form and "
                f"cannot change at run time; {_MERGE}"
            )
        if is_transposed and converted.shape == up.T.shape != up.shape:
            converted = converted.T  # this one is stored like other matrices
        shape = list(converted.shape[:1]) + list(down.shape[1:])
        wanted = list(target.shape)
        if shape != wanted or converted.dim() != 2:
            raise ConfigError(
                f"the adapter changes {name!r} as a matrix of {shape}, but the model's is "
                f"{wanted}: it was made for another model"
            )
        down, up = _share(down, target.splits, -1), _share(converted, target.splits, -2)
        scale = config.scale(name, module.rank) * target.factor
        down, up = (matrix.to(target.layer.dtype) for matrix in (down, up))
        for matrix in (down, up):
            check_finite(name, matrix)  # large values may overflow the model's type
        return target.layer.prepare(Factors(down, up, scale))


def held(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None if another pipeline stage has it."""
    found: nn.Module | None = model
    for name in path.split("."):
        found = None if found is None else getattr(found, name, None)
    return found


def _of_all_experts(
    here: Sequence[AdapterTarget], own: IndexSelection, elsewhere: Sequence[str], parts: int
) -> list[AdapterTarget]:
    """The targets of a stack, expert by expert, including experts of other ranks."""
    found = {expert: here[i * parts : (i + 1) * parts] for i, expert in enumerate(own.numbers)}
    others = [expert for expert in range(own.whole) if expert not in found]
    for i, expert in enumerate(others):
        names = elsewhere[i * parts : (i + 1) * parts]
        found[expert] = [
            replace(target, source=name, here=False)
            for target, name in zip(here[:parts], names, strict=True)
        ]
    return [target for expert in range(own.whole) for target in found[expert]]


def _share(matrix: torch.Tensor, splits: Splits, dim: int) -> torch.Tensor:
    """This rank's shard of an adapter matrix, sharded like the model's."""
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
        lacking = f"it replaces the whole of {next(iter(adapter.whole))!r} (modules_to_save)"
    if lacking:
        raise ConfigError(f"the adapter cannot be applied at run time: {lacking}; {_MERGE}")


def _as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    del name
    return tensor


def num_bytes(content: Content) -> int:
    """Bytes of an adapter's matrices."""
    return sum(part.num_bytes for _, parts in content for part in parts if part is not None)
