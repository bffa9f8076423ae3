"""The weights of a model that is being served: read back, hashed, and replaced in place.

Tensors are named and shaped as in the checkpoint. A parameter that joins several of them (queries,
keys and values; gate and up) takes each into its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import nn

from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.weights import (
    Int4Weight,
    Int8Weight,
    quantise_int4,
    quantise_int8,
)
from sylvan.kernels.native.copies import DENSE, Content, Form, form_of
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, ExecutorError
from sylvan.runtime.models.checkpoint import Slot, WeightReader, slots, source_rows
from sylvan.runtime.models.holders import Holder
from sylvan.runtime.models.stored import WeightFiles
from sylvan.runtime.models.texts import canonical

_TORN = "the weights are those of no model: an update failed midway; update all of them"
_GONE = "the memory of the weights was given back; update all of them"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as checkpoints of this model have it: a number of rows of a parameter."""

    name: str
    slot: Slot
    number: int  # of the source


class LiveWeights:
    """Owns what may be done to the weights of one model while no step runs.

    Args:
        skeleton: The model without contents, for names and shapes.
        holders: What keeps the contents of each parameter.
        changed: Called after contents have changed, for what was made of them.

    Attributes:
        missing: Why no step may run; None: all is there.
    """

    def __init__(
        self,
        skeleton: Callable[[], nn.Module],
        holders: Mapping[str, Sequence[Holder]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._skeleton, self._holders, self._changed = skeleton, holders, changed
        self.missing: str | None = None
        model = skeleton()
        self._rename: Callable[[str], str] = getattr(model, "rename", canonical)
        self._convert: Callable[[str, torch.Tensor], torch.Tensor] | None = getattr(
            model, "convert", None
        )
        found = (Tensor(s, slot, i) for slot in slots(model) for i, s in enumerate(slot.sources))
        self._tensors = {tensor.name: tensor for tensor in found}

    # ---- replace

    def update(self, files: WeightFiles, *, partial: bool) -> tuple[str, ...]:
        """Put the tensors of `files` in the place of those of the same names; returns these.

        Everything is checked before the first is written: a file that does not fit changes nothing.

        Args:
            files: Of a checkpoint of this architecture.
            partial: Some tensors suffice; else all must be there.

        Raises:
            ConfigError: a tensor is missing, unexpected, of another shape or kind, or not finite;
                names it.
            ExecutorError: the files changed while they were read, so that the weights are a mixture
                from now on; see `missing`.
        """
        reader, present = self._checked(files, partial=partial)
        names: list[str] = []
        self.missing = _TORN
        try:
            for name, numbers in present.items():
                self._replace(reader, name, numbers)
                names += [reader.slot(name).sources[number] for number in numbers]
        except (ConfigError, OSError, RuntimeError, MemoryError) as error:
            raise ExecutorError(f"{_TORN} ({error})") from error
        self._changed()
        self.missing = None
        return tuple(names)

    def check(self, files: WeightFiles, *, partial: bool) -> None:
        """All that `update` checks, without a change.

        Raises:
            ConfigError: see `update`.
        """
        self._checked(files, partial=partial)

    def _checked(
        self, files: WeightFiles, *, partial: bool
    ) -> tuple[WeightReader, Mapping[str, Sequence[int]]]:
        partial = partial and self.missing is None
        reader = WeightReader(self._skeleton(), files, partial=partial)
        present = reader.present
        self._check_repeated(reader, present)
        if not present:
            raise ConfigError("the update has no tensors")
        self._check(reader, present)
        return reader, present

    def _check(self, reader: WeightReader, present: Mapping[str, Sequence[int]]) -> None:
        for name, numbers in present.items():
            holders = self._holders.get(name, ())
            if not holders:
                raise ConfigError(
                    f"tensor {reader.slot(name).sources[0]!r} is used in a form that cannot be "
                    "replaced while it is served; restart the server with the new weights"
                )
            whole = len(numbers) == len(reader.slot(name).sources)
            if not whole and self._read(name) is None:
                raise ConfigError(
                    f"{name!r} is kept in a form that takes all of its tensors at once: "
                    f"{', '.join(reader.slot(name).sources)}"
                )
            for number in numbers:
                content = reader.read_source(name, number)
                for holder in holders:
                    _check_form(reader.slot(name).sources[number], form_of(content), holder.form)

    def _check_repeated(self, reader: WeightReader, present: Mapping[str, Sequence[int]]) -> None:
        """A tensor that is tied to another may be sent as well, but not say something else."""
        for name, first in reader.repeated.items():
            if first not in present:
                raise ConfigError(f"tensor {name!r} is tied to {first!r} here; send that")
            if not reader.same(name, first):
                raise ConfigError(f"tensor {name!r} is tied to {first!r} here, but differs from it")

    def _replace(self, reader: WeightReader, name: str, numbers: Sequence[int]) -> None:
        holders = self._holders[name]
        slot = reader.slot(name)
        parts = [reader.read_source(name, number) for number in numbers]
        made: dict[Form, Content] = {}
        for holder in holders:
            if holder.form not in made:
                shaped = [_in_form(part, holder.form) for part in parts]
                made[holder.form] = self._joined(slot, numbers, shaped)
            holder.write(made[holder.form])

    def _joined(
        self,
        slot: Slot,
        numbers: Sequence[int],
        parts: Sequence[Content],
    ) -> Content:
        """The whole parameter, rows that are not replaced from where they are now."""
        if len(slot.sources) == 1:
            return parts[0]
        stacked = len(slot.shape) == 3
        if len(numbers) == len(slot.sources):
            whole = _concatenated(parts)
            return _stacked(whole, slot.shape[0]) if stacked else whole
        now = self._read(slot.name)
        assert now is not None, "checked before"
        now = _in_form(now, form_of(parts[0]))
        flat = _flat(now) if stacked else now
        for number, part in zip(numbers, parts, strict=True):
            rows = source_rows(slot, number)
            for old, new in zip(_numbers(flat), _numbers(part), strict=True):
                old[rows] = new
        return now

    # ---- read

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors, as the model calls them."""
        return tuple(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` of the weights in force, with or without the checkpoint's prefix.

        Quantised matrices are given as the numbers that they stand for. Shape: the checkpoint's.

        Raises:
            ConfigError: there is none, or it is kept in another order than checkpoints have.
        """
        tensor = self._named(name)
        self._check_there()
        found = self._source(tensor)
        if found is None or self._reorders(tensor.name, found):
            raise ConfigError(f"tensor {name!r} is kept in another order than checkpoints have")
        return found

    def places(self, name: str) -> tuple[tuple[int, ...], list[IntArray]] | None:
        """The whole shape of a tensor, and of each dimension which entries are here; None: all."""
        tensor = self._named(name)
        shape = list(self.tensor(name).shape)
        places = [np.arange(size, dtype=np.int32) for size in shape]
        for dim, split in tensor.slot.splits_of(tensor.number).items():
            shape[dim], places[dim] = split.whole, split.places
        return (tuple(shape), places) if tensor.slot.splits else None

    def checksums(self, skip: Collection[str] = ()) -> dict[str, str]:
        """XXH3-128 of the numbers of each tensor, row by row, as the model computes with them.

        Those that are kept in another order than checkpoints have are hashed in that order.
        """
        self._check_there()
        left = {self._rename(name) for name in skip} | set(skip)
        return dict(self._checksums(left))

    def _checksums(self, left: Collection[str]) -> Iterator[tuple[str, str]]:
        for name, holders in self._holders.items():
            tensors = [t for t in self._tensors.values() if t.slot.name == name]
            whole = self._read(name)
            for tensor in tensors:
                if tensor.name in left:
                    continue
                if whole is None:
                    parts = [part for holder in holders for part in holder.tensors]
                else:
                    parts = list(_numbers(self._rows_of(tensor, whole)))
                digest = xxhash.xxh3_128()
                for part in parts:
                    digest.update(_bytes(part))
                yield tensor.name, digest.hexdigest()

    def _named(self, name: str) -> Tensor:
        tensor = self._tensors.get(name) or self._tensors.get(self._rename(name))
        if tensor is None:
            raise ConfigError(f"this model has no tensor {name!r}")
        return tensor

    def _check_there(self) -> None:
        if self.missing is not None:
            raise ConfigError(self.missing)

    def _source(self, tensor: Tensor) -> torch.Tensor | None:
        whole = self._read(tensor.slot.name)
        if whole is None:
            return None
        part = self._rows_of(tensor, whole)
        if isinstance(part, torch.Tensor):
            return part.to(tensor.slot.dtype)
        return part.rows(torch.arange(part.shape[0])) if len(part.shape) == 2 else None

    def _rows_of(self, tensor: Tensor, whole: Content) -> Content:
        slot = tensor.slot
        if len(slot.sources) == 1:
            return whole
        flat = _flat(whole) if len(slot.shape) == 3 else whole
        rows = source_rows(slot, tensor.number)
        if isinstance(flat, torch.Tensor):
            return flat[rows]
        if isinstance(flat, Int8Weight):
            return Int8Weight(flat.q[rows], flat.scale[rows])
        return Int4Weight(flat.q[rows], flat.scale[rows], flat.group)

    def _read(self, name: str) -> Content | None:
        """The contents of a parameter, in its type where it is of plain numbers."""
        found = (holder.read() for holder in self._holders.get(name, ()))
        return next((c for c in found if c is not None), None)

    def _reorders(self, source: str, found: torch.Tensor) -> bool:
        return self._convert is not None and self._convert(source, found) is not found

    # ---- memory

    @property
    def memory(self) -> list[torch.Tensor]:
        """All memory of the weights, each piece once."""
        found: dict[int, torch.Tensor] = {}
        for holders in self._holders.values():
            for holder in holders:
                found |= {tensor.data_ptr(): tensor for tensor in holder.tensors}
        return list(found.values())

    def forget(self) -> None:
        """Their memory was given back: all of them must be updated before the next step."""
        self.missing = _GONE


def _check_form(name: str, found: Form, wanted: Form) -> None:
    if found in (wanted, DENSE):
        return
    raise ConfigError(
        f"tensor {name!r} is stored as {_described(found)}, but it is served as "
        f"{_described(wanted)}"
    )


def _described(form: Form) -> str:
    return f"{form.kind} in groups of {form.group}" if form.group else form.kind


def _in_form(content: Content, form: Form) -> Content:
    """Plain numbers rounded as those that are in their place; others stay as they are."""
    if form_of(content) == form:
        return content
    assert isinstance(content, torch.Tensor), "checked before"
    if form.kind == "int8":
        return quantise_int8(content)
    if content.shape[-1] % form.group:
        raise Unsupported(f"{content.shape[-1]} inputs in groups of {form.group}")
    return quantise_int4(content, form.group)


def _numbers(content: Content) -> tuple[torch.Tensor, ...]:
    return (content,) if isinstance(content, torch.Tensor) else (content.q, content.scale)


def _like(content: Content, parts: Sequence[torch.Tensor]) -> Content:
    if isinstance(content, torch.Tensor):
        return parts[0]
    if isinstance(content, Int8Weight):
        return Int8Weight(*parts)
    return Int4Weight(parts[0], parts[1], content.group)


def _concatenated(parts: Sequence[Content]) -> Content:
    columns = zip(*(_numbers(part) for part in parts), strict=True)
    return _like(parts[0], [torch.cat(column) for column in columns])


def _stacked(content: Content, count: int) -> Content:
    return _like(content, [part.unflatten(0, (count, -1)) for part in _numbers(content)])


def _flat(content: Content) -> Content:
    """A stack as one matrix, over the same memory."""
    return _like(content, [part.view(-1, *part.shape[2:]) for part in _numbers(content)])


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data
