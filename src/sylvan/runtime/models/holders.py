"""Holders of the weights of a running model: tensors and packed copies, read and written there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight, Form, QuantisedWeight
from sylvan.kernels.native.copies import Content, WeightCopy
from sylvan.runtime.models.slots import Slot


class Holder(Protocol):
    """Stores the contents of a parameter; a parameter may have several holders."""

    @property
    def form(self) -> Form:
        """Type and layout of the stored numbers."""
        ...

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors over the holder's memory."""
        ...

    def read(self) -> Content | None: ...

    def write(self, content: Content) -> None: ...

    @property
    def takes_rows(self) -> bool: ...

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TensorHolder:
    """A plain tensor that PyTorch computes with."""

    tensor: torch.Tensor

    @property
    def form(self) -> Form:
        return Form()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor.detach(),)

    def read(self) -> Content | None:
        return self.tensor.detach().to("cpu", copy=True)

    def write(self, content: Content) -> None:
        if not isinstance(content, torch.Tensor) or content.shape != self.tensor.shape:
            raise Unsupported(f"contents of another shape than {list(self.tensor.shape)}")
        self.tensor.detach().copy_(content)

    @property
    def takes_rows(self) -> bool:
        return False

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool:
        raise Unsupported("rows of what is written whole")


@dataclass(frozen=True, slots=True)
class QuantisedHolder:
    """A quantised matrix that PyTorch computes with."""

    weight: QuantisedWeight

    @property
    def form(self) -> Form:
        return self.weight.form

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.weight.tensors

    def read(self) -> Content | None:
        return self.weight.like([part.to("cpu", copy=True) for part in self.weight.tensors])

    def write(self, content: Content) -> None:
        if isinstance(content, torch.Tensor) or content.form != self.form:
            raise Unsupported(f"contents that are not {self.form}")
        for own, new in zip(self.weight.tensors, content.tensors, strict=True):
            own.copy_(new)

    @property
    def takes_rows(self) -> bool:
        return False

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool:
        raise Unsupported("rows of what is written whole")


@dataclass(frozen=True, slots=True)
class CopyHolder:
    """A copy in the memory of a native program."""

    copy: WeightCopy

    @property
    def form(self) -> Form:
        return self.copy.form

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in self.copy.memory)

    def read(self) -> Content | None:
        return self.copy.read()

    def write(self, content: Content) -> None:
        self.copy.write(content)

    @property
    def takes_rows(self) -> bool:
        return self.copy.takes_rows

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool:
        return self.copy.write_rows(rows_NK, first)


@dataclass(frozen=True, slots=True)
class RowsHolder:
    """Rows of a copy that several parameters share, all of them plain numbers."""

    copy: WeightCopy
    first: int
    count: int

    @property
    def form(self) -> Form:
        return self.copy.form

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the whole copy."""
        return CopyHolder(self.copy).tensors

    def read(self) -> Content | None:
        whole = self.copy.read()
        return None if whole is None else whole[self.first : self.first + self.count]

    def write(self, content: Content) -> None:
        whole = self.copy.read()
        if not isinstance(content, torch.Tensor) or not isinstance(whole, torch.Tensor):
            raise Unsupported("rows that are not plain numbers")
        whole[self.first : self.first + self.count] = content
        self.copy.write(whole)

    @property
    def takes_rows(self) -> bool:
        return self.copy.takes_rows

    def write_rows(self, rows_NK: torch.Tensor, first: int) -> bool:
        return self.copy.write_rows(rows_NK, self.first + first)


def with_tensors(
    model: nn.Module,
    slots: Iterable[Slot],
    packed: Mapping[str, Sequence[Holder]],
    lost: Collection[str],
) -> Mapping[str, tuple[Holder, ...]]:
    """Find all holders of each parameter of `model`; none for those in `lost`.

    Args:
        model: The running model.
        slots: Its parameters.
        packed: Packed copies in native programs.
        lost: Parameters with other copies that cannot be updated.
    """
    found: dict[str, tuple[Holder, ...]] = {}
    for slot in slots:
        own = _holder(_attribute(model, slot))
        holders = (*packed.get(slot.name, ()), *([own] if own else []))
        found[slot.name] = () if slot.name in lost else holders
    return found


class ParameterNames:
    """Maps objects to parameter names of a model; built before any parameter is packed."""

    def __init__(self, model: nn.Module, slots: Iterable[Slot]) -> None:
        self._slots = list(slots)
        self._kept = {slot.name: _attribute(model, slot) for slot in self._slots}
        self._names = {id(value): name for name, value in self._kept.items() if value is not None}

    def of(self, source: object) -> str | None:
        """The parameter that `source` is, or was made from; None if unknown."""
        if isinstance(source, DeferredWeight):
            return source.key
        return self._names.get(id(source))

    def holders(
        self, model: nn.Module, copies: Sequence[WeightCopy]
    ) -> Mapping[str, tuple[Holder, ...]]:
        """All holders of each parameter of the running `model`."""
        found: dict[str, list[Holder]] = {slot.name: [] for slot in self._slots}
        for copy in copies:
            if (name := self.of(copy.source)) in found:
                found[name].append(CopyHolder(copy))
        for slot in self._slots:
            for value in (self._kept[slot.name], _attribute(model, slot)):
                holder = _holder(value)
                if holder is not None and not any(_same(holder, h) for h in found[slot.name]):
                    found[slot.name].append(holder)
        return {name: tuple(holders) for name, holders in found.items()}


def _attribute(model: nn.Module, slot: Slot) -> object:
    """The model's attribute with the name of a parameter; None if a layer was replaced."""
    path, _, attribute = slot.name.rpartition(".")
    try:
        return getattr(model.get_submodule(path), attribute)
    except AttributeError:
        return None


def _holder(value: object) -> Holder | None:
    """The holder of an object that has contents of its own; None for others."""
    if isinstance(value, QuantisedWeight):
        there = value.q.numel() > 0 and value.q.untyped_storage().nbytes() > 0
        return QuantisedHolder(value) if there else None
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return None
    return TensorHolder(value) if value.untyped_storage().nbytes() else None


def _same(one: Holder, other: Holder) -> bool:
    places = ({t.data_ptr() for t in holder.tensors} for holder in (one, other))
    return next(places) == next(places)
