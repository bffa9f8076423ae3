"""Parameters of a model, and the tensors of a checkpoint that fill them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.moe import Experts
from sylvan.runtime.layers.recurrent import Conv
from sylvan.runtime.models.shards import (
    Splits,
    expert_selection,
    of_each,
    of_source,
    splits_of,
    whole_shape,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter, and the checkpoint tensors that are joined along dim 0 to fill it.

    `shape` is the shape of this rank's shard, `splits` describe the shard. `elsewhere` are tensors
    of experts that only other ranks hold. `by_expert`: each source is the matrix of one expert of a
    stack.
    """

    module: nn.Module
    attribute: str
    name: str
    sources: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    splits: Splits
    elsewhere: tuple[str, ...] = ()
    by_expert: bool = False

    @property
    def parameter(self) -> torch.Tensor:
        """The model's parameter."""
        return getattr(self.module, self.attribute)

    def splits_of(self, number: int) -> Splits:
        """How ranks shard a source."""
        count = len(self.sources)
        if self.by_expert:
            return of_source(of_each(self.splits), number, count // self.shape[0])
        return of_source(self.splits, number, count)


def slots(model: nn.Module) -> Iterator[Slot]:
    """Yield every parameter once; tied ones under the first name.

    Families that need more than `fused` map the resulting names with `source_name`.
    """
    fused, of_source = getattr(model, "fused", {}), getattr(model, "source_name", str)
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        head, _, last = path.rpartition(".")
        parts = fused.get(last, (last,))
        above = [fused.get(part, (part,)) for part in head.split(".") if part]
        stem = "".join(f"{names[0]}." for names in above if names)
        module, shape = model.get_submodule(path), parameter.shape
        sources = tuple(f"{stem}{part}.{attribute}" for part in parts)
        splits, elsewhere = splits_of(parameter), tuple[str, ...]()
        by_expert = isinstance(module, Experts) and not getattr(model, "stacked", False)
        if by_expert:
            names = fused.get(attribute, (attribute,))
            own = expert_selection(splits)
            here = range(len(parameter)) if own is None else own.numbers
            others = () if own is None else sorted({*range(own.whole)} - {*here})
            sources, elsewhere = (
                tuple(
                    f"{stem}{last}.{n}.{part}.weight" for n, part in itertools.product(some, names)
                )
                for some in (here, others)
            )
        yield Slot(
            module,
            attribute,
            name,
            tuple(of_source(source) for source in sources),
            shape,
            parameter.dtype,
            splits,
            tuple(of_source(source) for source in elsewhere),
            by_expert,
        )


def rows_of(slot: Slot) -> tuple[int, ...]:
    """Number of parameter rows that each source fills."""
    module = slot.module
    if isinstance(module, Linear | Conv) and len(module.parts) == len(slot.sources):
        return module.parts
    if slot.by_expert:
        return (slot.shape[0] * slot.shape[1] // len(slot.sources),) * len(slot.sources)
    assert len(slot.sources) == 1
    return (slot.shape[0],)


def with_whole_rows(slot: Slot) -> Slot:
    """The slot with the inputs of all ranks."""
    shape = whole_shape(slot.shape, {-1: slot.splits[-1]})
    others = {dim: split for dim, split in slot.splits.items() if dim != -1}
    return replace(slot, shape=torch.Size(shape), splits=others)


def source_rows(slot: Slot, number: int) -> slice:
    """Parameter rows that a source fills; in a stack, counted over all matrices."""
    rows = rows_of(slot)
    start = sum(rows[:number])
    return slice(start, start + rows[number])
