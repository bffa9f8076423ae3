"""Loads a checkpoint into a model's parameters: names, fusing, sharding, conversion, checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.matmul.weights import (
    DENSE,
    CodedWeight,
    DeferredWeight,
    PlainRows,
    QuantisedWeight,
    as_codes,
    join,
)
from sylvan.kernels.native.packing import all_finite
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.moe import Experts
from sylvan.runtime.models.files import LoadFormat, open_weights
from sylvan.runtime.models.formats import UNSPECIFIED, Formats, stored_format
from sylvan.runtime.models.formats.gguf import GgufBlocks, KeptBlocks, kept_blocks
from sylvan.runtime.models.formats.mxfp4 import Mxfp4
from sylvan.runtime.models.kv_scales import ENDS as OF_KEYS_AND_VALUES
from sylvan.runtime.models.mxfp4 import has_blocks, unpacked
from sylvan.runtime.models.quantise import Format, convert, form_of, is_multiplied, matrices
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.shards import take, take_quantised, whole_shape
from sylvan.runtime.models.slots import Slot, rows_of, slots, with_whole_rows
from sylvan.runtime.models.split_stacks import SplitStacks
from sylvan.runtime.models.stored import WeightFiles
from sylvan.runtime.models.text_parts import canonical

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in total) after each tensor."""

DERIVED = (
    ".rotary_emb.inv_freq",
    ".attn.masked_bias",
    ".attn.bias",
    ".attention.masked_bias",
    ".attention.bias",
    "rotary_emb.cos_cached",
)
"""Suffixes of buffers that some checkpoints store although the config implies them."""


_AS_STORED = Formats()
_BLOCK = 8 << 20  # bytes that are packed at a time


class WeightReader:
    """Reads one parameter at a time, so that a packer needs no second copy.

    `quantise` is the format for matrices stored as plain numbers. With `partial`, tensors may be
    missing; those present replace the ones of a running model. With `blocks`, matrices of GGUF and
    MXFP4 keep their format. With `plain`, no matrix keeps its format.

    Attributes:
        repeated: Checkpoint tensors that duplicate a tied parameter.
        has_others: Whether the checkpoint has tensors of experts that only other ranks hold.

    Raises:
        ConfigError: a tensor is missing, unexpected, or of another shape than config.json implies.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: WeightFiles,
        quantise: Format | None = None,
        *,
        partial: bool = False,
        blocks: bool = False,
        plain: bool = False,
    ) -> None:
        checkpoint = checkpoint if blocks else unpacked(checkpoint)
        parts_of = getattr(model, "parts_of", None)
        if parts_of is not None and not isinstance(checkpoint, KeptBlocks):
            checkpoint = SplitStacks(checkpoint, parts_of)
        self._checkpoint = checkpoint
        self._plain = plain
        self._bits = dict(matrices(model, quantise)) if quantise else {}
        self._quantise = quantise
        self._convert = getattr(model, "convert", _as_stored)
        rename = getattr(model, "rename", canonical)
        self._names = {rename(name): name for name in checkpoint.tensors}
        self._slots = {slot.name: slot for slot in slots(model)}
        sources = (source for slot in self._slots.values() for source in slot.sources)
        raw = getattr(getattr(model, "config", None), "raw", {})
        self._format = stored_format(raw) or UNSPECIFIED
        if isinstance(checkpoint, KeptBlocks):
            self._format = GgufBlocks()
        elif blocks and has_blocks(checkpoint):
            self._format = Mxfp4()
        self._parts = {source: self._format.parts_of(source, self._names) for source in sources}
        others = (source for slot in self._slots.values() for source in slot.elsewhere)
        elsewhere = {part for s in others for part in self._format.parts_of(s, self._names)}
        self._multiplied = {
            slot.name
            for slot in self._slots.values()
            if any(self._is_quantised(source) for source in slot.sources)
            and is_multiplied(model, slot.name)
        }
        wanted = {part for parts in self._parts.values() for part in parts}
        if len(self._names) < len(checkpoint.tensors):
            self._check_unique(rename, wanted)
        missing = sorted(wanted - self._names.keys())
        if partial:
            missing = sorted(self._torn_apart() & set(missing))
        if missing:
            raise ConfigError(missing_tensors([self._as_named(name) for name in missing]))
        self.has_others = not elsewhere.isdisjoint(self._names)
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied |= elsewhere
        repeats = self._repeats(model)
        self.repeated = {
            name: repeats[name] for name in repeats.keys() & self._names.keys() - wanted
        }
        idle = tuple(getattr(model, "unused", ()))
        extra = sorted(
            name
            for known, name in self._names.items()
            if known not in wanted | tied
            and not known.endswith(DERIVED + OF_KEYS_AND_VALUES)
            and not known.startswith(idle)
            and not self._format.idle(known, self._tensor_of)
        )
        if extra:
            raise ConfigError(
                f"the checkpoint has the tensor {extra[0]!r}, which this architecture does not use"
                + (f" ({len(extra)} such tensors)" if len(extra) > 1 else "")
            )

    def _check_unique(self, rename: Callable[[str], str], wanted: Collection[str]) -> None:
        for name in self._checkpoint.tensors:
            other = self._names[rename(name)]
            if name != other and rename(name) in wanted:
                raise ConfigError(f"tensors {name!r} and {other!r} are two names of one parameter")

    def _as_named(self, name: str) -> str:
        """The name with the prefix that the checkpoint's other tensors have."""
        beside = name.split(".", 1)[0] + "."
        for group in (beside, "" if beside == "lm_head." else "layers."):
            for known, stored in self._names.items():
                if group and known.startswith(group) and stored.endswith(known):
                    return stored.removesuffix(known) + name
        return name

    def read(self, name: str) -> torch.Tensor | QuantisedWeight:
        """Read the parameter `name`: joined, converted and checked; returns new tensors."""
        slot = self._slots[name]
        if any(self._is_quantised(source) for source in slot.sources):
            return self._quantised(slot)
        if name not in self._bits:
            return self._joined(slot)
        if self._quantise is not None and self._quantise.scheme is not None:
            return self._converted_by_source(slot, self._quantise)
        if -1 not in slot.splits:
            return convert(name, self._joined(slot), self._bits[name], self._quantise)
        # the scale of a row covers the whole row, on every rank
        rows = self._joined(with_whole_rows(slot))
        whole = convert(name, rows, self._bits[name], self._quantise)
        return take_quantised(name, whole, {-1: slot.splits[-1]})

    def _converted_by_source(self, slot: Slot, wanted: Format) -> QuantisedWeight:
        """Quantise each source as a whole, as a quantised checkpoint would, then shard it."""
        parts: list[QuantisedWeight] = []
        for number, source in enumerate(slot.sources):
            tensor = self._convert(source, self._checkpoint.tensor(self._names[source]))
            check_finite(self._names[source], tensor)
            whole = convert(source, tensor.to(slot.dtype), self._bits[slot.name], wanted)
            parts.append(take_quantised(source, whole, slot.splits_of(number)))
        found = join(parts)
        stacked = len(slot.shape) == 3 and len(found.shape) == 2
        found = found.stacked(slot.shape[0]) if stacked else found
        if found.shape != slot.shape:
            raise ConfigError(
                f"{slot.name!r} has shape {list(found.shape)}, but config.json implies "
                f"{list(slot.shape)}"
            )
        return found

    def _joined(self, slot: Slot) -> torch.Tensor:
        """Read a parameter whose sources are plain numbers."""
        out = torch.empty(slot.shape, dtype=slot.dtype)
        flat = out.flatten(0, 1) if slot.by_expert else out
        row = 0
        for number, rows in enumerate(rows_of(slot)):
            target = flat[row : row + rows]
            target.copy_(self._part(slot, number, target.shape))
            check_finite(self._names[slot.sources[number]], target)
            row += rows
        return out

    def plain_rows(self, name: str) -> PlainRows | None:
        """Rows of the parameter `name` that are rounded while they are packed.

        Returns: None if only `read` can read it.

        Raises:
            ConfigError: see `convert`.
        """
        slot = self._slots[name]
        bits = self._bits.get(name)
        stored = any(self._is_quantised(source) for source in slot.sources)
        divided = bits is not None and -1 in slot.splits
        if stored or divided or slot.dtype not in (torch.bfloat16, torch.float32):
            return None
        form = DENSE
        if bits is not None:
            assert self._quantise is not None
            form = form_of(name, slot.shape[-1], bits, self._quantise)
        return form and PlainRows(form, lambda: self._rows(slot))

    def _rows(self, slot: Slot) -> Iterator[torch.Tensor]:
        """The rows of a parameter whose sources are plain numbers, a few megabytes at a time."""
        rest = slot.shape[2 if slot.by_expert else 1 :]
        for number, rows in enumerate(rows_of(slot)):
            part = self._part(slot, number, torch.Size((rows, *rest)))
            matrices = part if part.dim() == 3 else (part,)
            for matrix in matrices:
                most = max(1, _BLOCK // max(1, matrix.shape[1] * slot.dtype.itemsize))
                for block in matrix.split(most):
                    found = block.to(slot.dtype)
                    check_finite(self._names[slot.sources[number]], found)
                    yield found
                    if isinstance(self._checkpoint, Checkpoint):
                        self._checkpoint.release(block)

    def _repeats(self, model: nn.Module) -> dict[str, str]:
        """Other names of tied parameters, mapped to their first names."""
        first = {id(slot.parameter): slot.name for slot in self._slots.values()}
        every = model.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in every if first.get(id(p), name) != name}

    def _torn_apart(self) -> set[str]:
        """Parts of sources whose other parts are missing."""
        groups = (set(parts) for parts in self._parts.values())
        return {part for parts in groups if parts & self._names.keys() for part in parts}

    @property
    def present(self) -> dict[str, tuple[int, ...]]:
        """Indices of the sources present, for each parameter that has any."""
        found = {
            name: tuple(
                number
                for number, source in enumerate(slot.sources)
                if self._names.keys() >= set(self._parts[source])
            )
            for name, slot in self._slots.items()
        }
        return {name: numbers for name, numbers in found.items() if numbers}

    def slot(self, name: str) -> Slot:
        """The slot of a parameter of the model."""
        return self._slots[name]

    def is_plain(self, name: str) -> bool:
        """Whether all sources of the parameter `name` are stored as plain numbers."""
        return not any(self._is_quantised(source) for source in self._slots[name].sources)

    def read_source(
        self, name: str, number: int, *, checked: bool = True, whole_rows: bool = False
    ) -> torch.Tensor | QuantisedWeight:
        """Read one source of the parameter `name`, converted and checked, as a matrix.

        Plain numbers may be a view of the file. With `whole_rows`, they include the inputs of all
        ranks; without `checked`, they may be non-finite.

        Raises:
            ConfigError: see `WeightReader`; also numbers that are not finite. Names the tensor.
        """
        slot = self._slots[name]
        if whole_rows:
            slot = with_whole_rows(slot)
        source = slot.sources[number]
        if self._is_quantised(source):
            return self._quantised_part(slot, number)
        rows = rows_of(slot)[number]
        rest = slot.shape[2 if slot.by_expert else 1 :]
        found = self._part(slot, number, torch.Size((rows, *rest)))
        found = found.to(slot.dtype)
        if checked:
            check_finite(self._names[source], found)
        return found

    def same(self, name: str, slot: str) -> bool:
        """Whether the tensor `name`, which duplicates a parameter, equals it."""
        source = self._slots[slot].sources[0]
        stored = (self._names[x] for x in (name, source))
        one, other = (self._checkpoint.tensor(x) for x in stored)
        return one.dtype == other.dtype and torch.equal(one, other)

    def check(self) -> int:
        """Compare the shapes of all plain tensors without reading them; return their number.

        Raises:
            ConfigError: a tensor has another shape or type; names it.
        """
        plain = 0
        for slot in self._slots.values():
            rest = slot.shape[2 if slot.by_expert else 1 :]
            if not any(self._is_quantised(source) for source in slot.sources):
                for number, rows in enumerate(rows_of(slot)):
                    self._part(slot, number, torch.Size((rows, *rest)))
                    plain += 1
        return plain

    def stored_name(self, source: str) -> str:
        """The checkpoint's name of the tensor `source` of a slot."""
        return self._names[source]

    def reorders(self, source: str, name: str) -> bool:
        """Whether the model stores the tensor `name` in another layout."""
        tensor = self._checkpoint.tensor(name)
        return self._convert(source, tensor) is not tensor

    def num_bytes(self, name: str) -> int:
        """Size of a parameter in the checkpoint."""
        parts = (part for source in self._slots[name].sources for part in self._parts[source])
        sources = (self._checkpoint.tensors[self._names[part]] for part in parts)
        return sum(t.stop - t.start for t in sources)

    def _quantised(self, slot: Slot) -> torch.Tensor | QuantisedWeight:
        """Read a quantised matrix; as plain numbers if the kernel needs them."""
        found = self._parts_of(slot)
        whole = _joined_parts(slot.name, found)
        stacked = isinstance(slot.module, Experts) and len(whole.shape) == 2
        shape = whole.shape
        if stacked:
            shape = torch.Size((slot.shape[0], shape[0] // slot.shape[0], shape[1]))
        coded = isinstance(whole, CodedWeight) and hasattr(slot.module, "weight")
        if shape != slot.shape or not (coded or isinstance(slot.module, Linear | Experts)):
            raise ConfigError(
                f"the quantised {slot.name!r} has shape {list(shape)}, but config.json "
                f"implies a linear layer of {list(slot.shape)}"
            )
        if isinstance(whole, torch.Tensor):
            return whole.to(slot.dtype).view(shape)
        if self._plain:
            return whole.numbers().to(slot.dtype).view(shape)
        if isinstance(whole, CodedWeight) and slot.name not in self._multiplied:
            return whole.numbers().to(slot.dtype)
        return whole.stacked(slot.shape[0]) if stacked else whole

    def _parts_of(self, slot: Slot) -> Sequence[torch.Tensor | QuantisedWeight]:
        """Read its sources; as plain numbers if they mix with quantised ones and may do so."""
        numbers = range(len(slot.sources))
        if self._format.mixes and not all(self._is_quantised(source) for source in slot.sources):
            return [_numbers(self.read_source(slot.name, number)) for number in numbers]
        return [self._quantised_part(slot, number) for number in numbers]

    def _quantised_part(self, slot: Slot, number: int) -> QuantisedWeight:
        source = slot.sources[number]
        parts = self._parts[source]
        stored = self._names[parts[0]]
        if not self._is_quantised(source):
            raise ConfigError(
                f"tensor {stored!r} is not quantised, but the others joined in {slot.name!r} are"
            )
        if parts[0] == source and self.reorders(source, stored):
            raise ConfigError(
                f"the quantised {stored!r} would have to be reordered, which is not supported"
            )
        whole = self._format.read(source, parts, self._tensor_of)
        if len(whole.shape) == 3:
            whole = self._in_order(source, whole)
        return take_quantised(source, whole, slot.splits_of(number))

    def _in_order(self, source: str, stack: QuantisedWeight) -> QuantisedWeight:
        """A stack with rows in model order; plain stacks are stored as (E, inputs, outputs).

        Applying `convert` to output indices gives the order.
        """
        rows = torch.arange(stack.shape[1]).view(1, 1, -1)
        order = self._convert(source, rows).flatten()
        return stack.like([part[:, order] for part in stack.tensors])

    def _is_quantised(self, source: str) -> bool:
        return self._parts[source] != (source,)

    def _tensor_of(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(self._names[name])

    def _part(self, slot: Slot, number: int, shape: torch.Size) -> torch.Tensor:
        """This rank's shard of a source, of `shape`; a view of the file if possible."""
        source, splits = slot.sources[number], slot.splits_of(number)
        tensor = self._checkpoint.tensor(self._names[source])
        plain = tensor.is_floating_point() and tensor.itemsize > 1
        if not plain and (tensor.is_floating_point() or slot.dtype.is_floating_point):
            raise ConfigError(
                f"tensor {self._names[source]!r} is stored as {tensor.dtype}; only unquantised "
                f"float weights can be read"
            )
        tensor = self._convert(source, tensor)
        whole = whole_shape(shape, splits)
        if tensor.shape != whole:
            raise ConfigError(
                f"tensor {self._names[source]!r} has shape {list(tensor.shape)}, but config.json "
                f"implies {list(whole)}"
            )
        return take(tensor, splits)


def load_weights(
    model: nn.Module,
    model_dir: Path,
    progress: Progress | None = None,
    formats: Formats = _AS_STORED,
    load_format: LoadFormat = "auto",
    *,
    device: torch.device | None = None,
) -> WeightReader:
    """Fill all parameters of `model` in place; quantised matrices replace theirs.

    Matrices that have no memory yet (see `Build.deferred`) get theirs on `device`.

    Raises:
        ConfigError: see `WeightReader`; also non-finite weights. Names the tensor.
    """
    files = open_weights(model_dir, load_format)
    files = kept_blocks(files) if formats.blocks else files
    kept = {"blocks": formats.blocks, "plain": formats.plain}
    reader = WeightReader(model, files, formats.converted, **kept)
    total = sum(reader.num_bytes(slot.name) for slot in slots(model))
    done, places = 0, LoadTargets(model)
    for slot in list(slots(model)):
        content, parameter = reader.read(slot.name), slot.parameter
        place = device if parameter.is_meta and device is not None else parameter.device
        if isinstance(content, torch.Tensor) and not parameter.is_meta:
            parameter.data.copy_(content)
        elif isinstance(content, torch.Tensor):
            whole = content.to(parameter.dtype).to(place)
            places.replace(parameter, nn.Parameter(whole, requires_grad=False))
        else:
            on_cpu = place.type == "cpu"
            places.replace(parameter, content if on_cpu else as_codes(content).to(place))
        done += reader.num_bytes(slot.name)
        if progress:
            progress(done, total)
    return reader


def defer_weights(
    model: nn.Module,
    model_dir: Path,
    progress: Progress | None = None,
    quantise: Format | None = None,
    load_format: LoadFormat = "auto",
    *,
    blocks: bool = False,
) -> WeightReader:
    """Fill the small parameters; leave each matrix as a `DeferredWeight` that reads it on demand.

    For packers that handle one matrix at a time. Tied matrices share a key.
    """
    files = open_weights(model_dir, load_format)
    files = kept_blocks(files) if blocks else files
    reader = WeightReader(model, files, quantise, blocks=blocks)
    total = sum(reader.num_bytes(slot.name) for slot in slots(model))
    progress = progress or (lambda done, total: None)
    meter, places = _Meter(reader, progress, total), LoadTargets(model)
    for slot in list(slots(model)):
        if slot.parameter.dim() >= 2:
            places.replace(slot.parameter, meter.deferred(slot))
        else:
            content = meter.read(slot.name)
            assert isinstance(content, torch.Tensor), "only matrices are quantised"
            slot.parameter.data.copy_(content)
    return reader


def load_deferred(model: nn.Module) -> None:
    """Read what `defer_weights` deferred and no packer used; tied matrices stay shared."""
    read: dict[str, LinearWeight] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if not isinstance(value, DeferredWeight):
                continue
            if value.key not in read:
                found = value.load()
                plain = isinstance(found, torch.Tensor)
                read[value.key] = nn.Parameter(found, requires_grad=False) if plain else found
            delattr(module, attribute)
            setattr(module, attribute, read[value.key])


class _Meter:
    """Reads parameters and reports progress."""

    def __init__(self, reader: WeightReader, progress: Progress, total: int) -> None:
        self._reader, self._progress, self._total, self._done = reader, progress, total, 0

    def read(self, name: str) -> torch.Tensor | QuantisedWeight:
        tensor = self._reader.read(name)
        self._count(name)
        return tensor

    def deferred(self, slot: Slot) -> DeferredWeight:
        name = slot.name
        plain = self._reader.plain_rows(name)
        if plain is not None:
            plain = replace(plain, read=partial(self._rows, name, plain.read))
        return DeferredWeight(slot.shape, lambda: self.read(name), name, plain=plain)

    def _rows(
        self, name: str, read: Callable[[], Iterator[torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        yield from read()
        self._count(name)

    def _count(self, name: str) -> None:
        self._done += self._reader.num_bytes(name)
        self._progress(self._done, self._total)


class LoadTargets:
    """Finds all modules that use a parameter (tied modules share it). Create it before loading."""

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for attribute, value in module.named_parameters(recurse=False):
                self._found.setdefault(id(value), []).append((module, attribute))

    def replace(self, parameter: torch.Tensor, weight: LinearWeight) -> None:
        """Put `weight` wherever `parameter` is used; once for each parameter."""
        for module, attribute in self._found[id(parameter)]:
            delattr(module, attribute)
            setattr(module, attribute, weight)


def _joined_parts(
    name: str, parts: Sequence[torch.Tensor | QuantisedWeight]
) -> torch.Tensor | QuantisedWeight:
    """Stack parts by rows; as plain numbers if their inputs have different orders."""
    quantised = [part for part in parts if isinstance(part, QuantisedWeight)]
    orders = [part.order for part in quantised if isinstance(part, CodedWeight)]
    first = next((order for order in orders if order is not None), None)
    alike = first is None or all(order is not None and order.equal(first) for order in orders)
    if len(quantised) < len(parts) or not alike:
        return torch.cat([_numbers(part) for part in parts])
    try:
        return join(quantised)
    except ValueError as error:
        raise ConfigError(f"the parts of {name!r} are {error}") from None


def _numbers(part: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    return part.float() if isinstance(part, torch.Tensor) else part.numbers()


def _as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Identity, for models without `convert`."""
    return tensor


def missing_tensors(names: Sequence[str]) -> str:
    """The error message for missing tensors; needs at least one name."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the checkpoint lacks the tensor {names[0]!r}{more}"


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Reject NaN and infinity, at about memory bandwidth.

    Raises:
        ConfigError: the tensor is not finite.
    """
    if not all_finite(tensor):
        raise not_finite(name, tensor.dtype)


def not_finite(name: str, dtype: torch.dtype) -> ConfigError:
    """The error for a tensor that is not finite."""
    return ConfigError(f"the weights of {name!r} are not finite (NaN or infinity) as {dtype}")
