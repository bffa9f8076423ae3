"""The weights of a running model: read back, hashed, and replaced in place.

Tensors are named and shaped as in the checkpoint. A parameter that joins several of them (queries,
keys and values; gate and up) takes each into its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import nn

from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.pack import form_of
from sylvan.kernels.matmul.weights import (
    DENSE,
    Form,
    QuantisedWeight,
    join,
    quantise_int4,
    quantise_int8,
)
from sylvan.kernels.native.copies import Content
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, ExecutorError
from sylvan.runtime.models.checkpoint import WeightReader, not_finite
from sylvan.runtime.models.holders import Holder
from sylvan.runtime.models.shards import take_quantised
from sylvan.runtime.models.slots import Slot, slots, source_rows
from sylvan.runtime.models.stored import WeightFiles
from sylvan.runtime.models.text_parts import IMAGES, canonical

_TORN = "an update failed midway, so old and new weights are mixed; update all weights"
_GONE = "the memory of the weights has been released; update all weights"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A checkpoint tensor of this model: some rows of a parameter."""

    name: str
    slot: Slot
    number: int  # index of the source


class LiveWeights:
    """Reads and updates the weights of a model between steps.

    Args:
        skeleton: The model without weights, for names and shapes.
        holders: Holders of each parameter's contents.
        changed: Called after updates, to refresh derived data.
        encoder_files: Weights of a media encoder, which cannot be updated. None: there is no
          encoder, and its tensors in an update are ignored.

    Attributes:
        missing: Why no step may run; None if the weights are complete.
    """

    def __init__(
        self,
        skeleton: Callable[[], nn.Module],
        holders: Mapping[str, Sequence[Holder]],
        changed: Callable[[], None] = lambda: None,
        encoder_files: WeightFiles | None = None,
    ) -> None:
        self._skeleton, self._holders, self._changed = skeleton, holders, changed
        self._encoder_files = encoder_files
        self.missing: str | None = None
        self._tensors: dict[str, Tensor] = {}
        self._elsewhere: set[str] = set()
        model = skeleton()
        self._rename: Callable[[str], str] = getattr(model, "rename", canonical)
        self._convert: Callable[[str, torch.Tensor], torch.Tensor] | None = getattr(
            model, "convert", None
        )
        self.index()

    def index(self) -> None:
        """Find out which checkpoint tensors this rank holds, after experts have moved."""
        every = tuple(slots(self._skeleton()))
        found = (Tensor(s, slot, i) for slot in every for i, s in enumerate(slot.sources))
        self._tensors = {tensor.name: tensor for tensor in found}
        self._elsewhere = {name for slot in every for name in slot.elsewhere}

    # ---- replace

    def update(self, files: WeightFiles, *, partial: bool) -> tuple[str, ...]:
        """Replace tensors by those of the same names in `files`; return the names.

        Everything is validated before the first write, so a bad file changes nothing.

        Args:
            files: A checkpoint of this architecture.
            partial: Whether some tensors suffice; otherwise all are required.

        Raises:
            ConfigError: a tensor is missing, unexpected, of another shape or kind, or not finite;
                names it.
            ExecutorError: the files changed while they were read, so the weights are now a mixture;
                see `missing`.
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

    def reload(self, files: WeightFiles, chosen: Callable[[Slot], bool]) -> None:
        """Reload some parameters after this rank's shard of them has changed.

        Raises:
            ConfigError: the checkpoint does not fit; nothing has changed.
            ExecutorError: see `update`.
        """
        if self.missing is not None:
            raise ConfigError(self.missing)
        reader = WeightReader(self._skeleton(), files)
        reader.check()
        names = [name for name in reader.present if chosen(reader.slot(name))]
        for name in names:
            self._check_replaceable(reader.slot(name))
        self.index()
        self.missing = _TORN
        try:
            for name in names:
                self._replace(reader, name, reader.present[name])
        except (ConfigError, OSError, RuntimeError, MemoryError) as error:
            raise ExecutorError(f"{_TORN} ({error})") from error
        self._changed()
        self.missing = None

    def fits(self, files: WeightFiles) -> None:
        """Check that the model has a parameter for every tensor of a checkpoint; reads none.

        Raises:
            ConfigError: It does not; names the tensor.
        """
        reader = WeightReader(self._skeleton(), files)
        reader.check()
        for name in reader.present:
            self._check_replaceable(reader.slot(name))

    def check(self, files: WeightFiles, *, partial: bool) -> None:
        """Run all checks of `update` without changing anything.

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
        if not present and not reader.has_others:
            raise ConfigError("the update contains no tensors")
        self._check(reader, present)
        if self._encoder_files is not None:
            self._check_encoder(files, self._encoder_files)
        return reader, present

    def _check(self, reader: WeightReader, present: Mapping[str, Sequence[int]]) -> None:
        for name, numbers in present.items():
            self._check_replaceable(reader.slot(name))
            holders = self._holders[name]
            whole = len(numbers) == len(reader.slot(name).sources)
            if not whole and self._read(name) is None:
                raise ConfigError(
                    f"{name!r} is stored in several tensors, which must be sent together: "
                    f"{', '.join(reader.slot(name).sources)}"
                )
            for number in numbers:
                content = reader.read_source(name, number)
                for holder in holders:
                    _check_form(reader.slot(name).sources[number], form_of(content), holder.form)

    def _check_encoder(self, files: WeightFiles, encoder_files: WeightFiles) -> None:
        """Accept tensors of the encoder only if they equal the current ones."""
        known = {self._rename(name): name for name in encoder_files.tensors}
        for name in files.tensors:
            source = self._rename(name)
            if not source.startswith(IMAGES):
                continue
            new = files.tensor(name)
            old = encoder_files.tensor(known[source]) if source in known else None
            if old is None or old.dtype != new.dtype or not torch.equal(old, new):
                raise ConfigError(
                    f"tensor {name!r} belongs to the media encoder, which cannot be updated while "
                    "serving; restart the server with the new weights"
                )

    def _check_replaceable(self, slot: Slot) -> None:
        if not self._holders.get(slot.name):
            raise ConfigError(
                f"tensor {slot.sources[0]!r} is kept in a form that cannot be updated while "
                "serving; restart the server with the new weights"
            )

    def _check_repeated(self, reader: WeightReader, present: Mapping[str, Sequence[int]]) -> None:
        """Accept tensors that are tied to another only if they equal it."""
        for name, first in reader.repeated.items():
            if first not in present:
                raise ConfigError(f"tensor {name!r} is tied to {first!r} in this model; send that")
            if not reader.same(name, first):
                raise ConfigError(f"tensor {name!r} is tied to {first!r}, but differs from it")

    def _replace(self, reader: WeightReader, name: str, numbers: Sequence[int]) -> None:
        slot, made = reader.slot(name), dict[Form, Content]()
        for holder in self._holders[name]:
            rounded_apart = holder.form.kind != "int8" or -1 not in slot.splits
            if holder.takes_rows and reader.is_plain(name) and rounded_apart:
                _write_rows(reader, name, numbers, holder)
                continue
            if holder.form not in made:
                parts = [_source(reader, name, number, holder.form) for number in numbers]
                made[holder.form] = self._joined(slot, numbers, parts)
            holder.write(made[holder.form])

    def _joined(
        self,
        slot: Slot,
        numbers: Sequence[int],
        parts: Sequence[Content],
    ) -> Content:
        """Build the whole parameter; rows that are not replaced keep their current contents."""
        stacked = slot.by_expert
        if len(slot.sources) == 1:
            return _stacked(parts[0], slot.shape[0]) if stacked else parts[0]
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
        """The model's names of all tensors."""
        return tuple(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """The current tensor `name`, with or without the checkpoint's prefix.

        Quantised matrices are dequantised. Shape: the checkpoint's.

        Raises:
            ConfigError: no such tensor, or its layout differs from the checkpoint's.
        """
        tensor = self._named(name)
        self._check_there()
        found = self._source(tensor)
        if found is None or self._reorders(tensor.name, found):
            raise ConfigError(f"tensor {name!r} is stored in another order than in checkpoints")
        return found

    def is_elsewhere(self, name: str) -> bool:
        """Whether only other ranks hold the tensor `name` of an expert."""
        return not self._elsewhere.isdisjoint((name, self._rename(name)))

    def places(self, name: str) -> tuple[tuple[int, ...], list[IntArray]] | None:
        """Full shape of a tensor, and which indices of each dimension are here; None if whole."""
        tensor = self._named(name)
        shape = list(self.tensor(name).shape)
        places = [np.arange(size, dtype=np.int32) for size in shape]
        for dim, split in tensor.slot.splits_of(tensor.number).items():
            shape[dim], places[dim] = split.whole, split.places
        return (tuple(shape), places) if tensor.slot.splits else None

    def checksums(self, skip: Collection[str] = ()) -> dict[str, str]:
        """XXH3-128 of each tensor's numbers, row by row, as the model computes with them.

        Tensors with another layout than the checkpoint's are hashed in that layout.
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
        if len(slot.sources) == 1 and not slot.by_expert:
            return whole
        flat = _flat(whole) if slot.by_expert else whole
        rows = source_rows(slot, tensor.number)
        return flat[rows]

    def _read(self, name: str) -> Content | None:
        """The contents of a parameter, in the parameter's type if they are plain numbers."""
        found = (holder.read() for holder in self._holders.get(name, ()))
        return next((c for c in found if c is not None), None)

    def _reorders(self, source: str, found: torch.Tensor) -> bool:
        return self._convert is not None and self._convert(source, found) is not found

    # ---- memory

    @property
    def num_numbers(self) -> int:
        """Total number of weights in all tensors."""
        slots = {tensor.slot.name: tensor.slot for tensor in self._tensors.values()}
        return sum(math.prod(slot.shape) for slot in slots.values())

    @property
    def memory(self) -> list[torch.Tensor]:
        """All memory of the weights, each region once."""
        found: dict[int, torch.Tensor] = {}
        for holders in self._holders.values():
            for holder in holders:
                found |= {tensor.data_ptr(): tensor for tensor in holder.tensors}
        return list(found.values())

    def mark_released(self) -> None:
        """Mark the weights as released: all must be updated before the next step."""
        self.missing = _GONE


def _write_rows(reader: WeightReader, name: str, numbers: Sequence[int], holder: Holder) -> None:
    """Write tensors of plain numbers in one pass, which also checks them again."""
    slot = reader.slot(name)
    for number in numbers:
        part = reader.read_source(name, number, checked=False)
        assert isinstance(part, torch.Tensor), "asked before"
        rows = part.flatten(0, -2)
        if not holder.write_rows(rows, source_rows(slot, number).start):
            raise not_finite(reader.stored_name(slot.sources[number]), part.dtype)


def _source(reader: WeightReader, name: str, number: int, form: Form) -> Content:
    """Convert a tensor to the `form` in which a parameter is kept."""
    splits = reader.slot(name).splits
    if form.kind != "int8" or -1 not in splits or not reader.is_plain(name):
        return _in_form(reader.read_source(name, number), form)
    # the scale of a row covers the whole row, on every rank
    whole = _in_form(reader.read_source(name, number, whole_rows=True), form)
    assert isinstance(whole, QuantisedWeight)
    return take_quantised(name, whole, {-1: splits[-1]})


def _check_form(name: str, found: Form, wanted: Form) -> None:
    if found == wanted or (found == DENSE and wanted.kind != "coded"):
        return
    raise ConfigError(f"tensor {name!r} is stored as {found}, but it is served as {wanted}")


def _in_form(content: Content, form: Form) -> Content:
    """Quantise plain numbers to the form that they replace; return other forms unchanged."""
    if form_of(content) == form:
        return content
    assert isinstance(content, torch.Tensor), "checked before"
    if form.kind == "int8":
        return quantise_int8(content)
    if content.shape[-1] % form.group:
        raise Unsupported(f"{content.shape[-1]} inputs in groups of {form.group}")
    return quantise_int4(content, form.group)


def _numbers(content: Content) -> tuple[torch.Tensor, ...]:
    return (content,) if isinstance(content, torch.Tensor) else content.tensors


def _concatenated(parts: Sequence[Content]) -> Content:
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(plain) == len(parts):
        return torch.cat(plain)
    return join([part for part in parts if not isinstance(part, torch.Tensor)])


def _stacked(content: Content, count: int) -> Content:
    if isinstance(content, torch.Tensor):
        return content.unflatten(0, (count, -1))
    return content.stacked(count)


def _flat(content: Content) -> Content:
    """View a stack as one matrix."""
    return (
        content.view(-1, *content.shape[2:])
        if isinstance(content, torch.Tensor)
        else content.flat()
    )


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data
