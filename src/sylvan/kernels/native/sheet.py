"""What a recorder writes on: calls, values, constants and packed weights of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch
from torch.nn import functional as F

from sylvan.kernels.api import Dtype, LinearWeight, Recorder, Rows, Unsupported, Value
from sylvan.kernels.matmul.pack import PackedWeight, as_bytes, pack, pack_nothing, pack_stack
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.binding import Constants, Kind
from sylvan.kernels.native.copies import MatrixCopy, VectorCopy, WeightCopy
from sylvan.kernels.native.plan import Call, Draft, Ref

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"f32": 4, "bf16": 2, "i32": 4})
WEIGHT_KINDS = ("dense", "int8", "int4")
_TILE_ROWS = 32  # rows of a matrix tile: buffers are long enough for the last one to be whole
T = TypeVar("T")
_FIRST_OF_LEVELS = 8  # buffers and sizes before those that say how rows are quantised
# Ops that can quantise the rows they make, and which of their buffers those are.
_QUANTISING: Mapping[Kind, int] = MappingProxyType(
    {
        Kind.RMS_NORM: 3,
        Kind.LAYER_NORM: 3,
        Kind.GLU: 1,
        Kind.ACTIVATION: 1,
        Kind.GATHER: 2,
    }
)
_LINEAR = (Kind.LINEAR, Kind.LINEAR_INT8, Kind.LINEAR_INT4)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecorderLimits:
    """What the program's buffers hold; requests are at most `max_outputs` too."""

    max_tokens: int
    max_outputs: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A packed weight, or a stack of them, and where its levels, scales and sums are."""

    packed: PackedWeight
    refs: tuple[Ref, Ref, Ref]


def padded(cols: int) -> int:
    """Columns of a row in memory."""
    return -(-cols // 32) * 32


class Sheet:
    """The values of a program belong to `owner`, which is asked for the ops on them.

    Weights are packed as they are met, each once. The memory of a torch parameter is freed when it
    has been packed: the model cannot compute with tensors afterwards. A rehearsal packs nothing
    and frees nothing; it tells whether a model can be recorded.

    Attributes:
        copies: What is kept of the weights met so far, to be read back and written over.
    """

    def __init__(
        self,
        owner: Recorder,
        dtype: torch.dtype,
        limits: RecorderLimits,
        constants: Constants,
        *,
        rehearsal: bool,
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported(f"rows of {dtype}")
        self.draft = Draft()
        self.constants = constants
        self.dtype: Dtype = "bf16" if dtype == torch.bfloat16 else "f32"
        self.weight_bytes = 0
        self.rehearsal = rehearsal
        self._owner = owner
        self._torch_dtype = dtype
        self._limits = limits
        self._placed: dict[object, Placed] = {}
        self.copies: list[WeightCopy] = []
        self._vectors: dict[tuple[int, float], tuple[object, Ref]] = {}
        self._quantised: dict[tuple[int, str, int], tuple[Ref, Ref, Ref]] = {}
        self._makers: dict[Ref, Call] = {}  # of rows whose maker may quantise them itself

    def new(self, cols: int, dtype: Dtype | None = None, like: Value | None = None) -> Value:
        """A new value with the rows of `like` (the step's tokens), in the model's dtype."""
        rows, times = (like.rows, like.times) if like else ("tokens", 1)
        return self.repeated(cols, dtype or self.dtype, rows, times)

    def repeated(self, cols: int, dtype: Dtype, rows: Rows, times: int) -> Value:
        """A new value with `times` rows for each of `rows`."""
        size = self.num_rows(rows, times) * padded(cols) * ELEMENT_BYTES[dtype]
        return Value(self._owner, self.draft.buffer(size), cols, dtype, rows, times)

    def num_rows(self, rows: Rows, times: int = 1) -> int:
        """The most rows there can be, and as many as a tile may read behind them."""
        most = self._limits.max_tokens if rows == "tokens" else self._limits.max_outputs
        most = -(-most * times // _TILE_ROWS) * _TILE_ROWS
        return most if times == 1 else most + _TILE_ROWS  # tiles of experts begin anywhere

    def note(
        self,
        kind: Kind,
        like: Value,
        buffers: tuple[Ref, ...],
        sizes: tuple[int, ...],
        scalars: tuple[float, ...] = (),
        *,
        type_: Dtype | None = None,
    ) -> None:
        """Note an op over the rows of `like`, which are of `type_` (that of `like`)."""
        row_type = type_ or like.dtype
        call = Call(kind, like.rows, row_type, buffers, sizes, scalars, like.times)
        self.draft.calls.append(call)
        if kind in _QUANTISING:
            self._makers[buffers[_QUANTISING[kind]]] = call

    def expect(self, x: Value, op: str) -> None:
        """Refuse rows that are not of the model's dtype."""
        if x.dtype != self.dtype:
            raise Unsupported(f"{op} of {x.dtype} rows in a {self.dtype} program")

    def vector(self, vector: torch.Tensor, offset: float = 0.0) -> Ref:
        """A float32 copy of a vector or table, padded with zeros to whole rows."""
        key = id(vector), offset
        if key not in self._vectors:
            values = vector.detach().float().flatten() + offset
            data = as_bytes(F.pad(values, (0, padded(len(values)) + 32 - len(values))))
            ref = self.draft.constant(data)
            self._vectors[key] = vector, ref  # keeps `vector` alive, so its id stays its own
            self.copies.append(VectorCopy(vector, data, vector.shape, 0, offset))
        return self._vectors[key][1]

    def rows_of(self, matrix: LinearWeight) -> Ref:
        """A float32 copy of the rows of a matrix, each padded: the biases of a stack."""
        if self.rehearsal:
            return None
        found = matrix.load() if isinstance(matrix, DeferredWeight) else matrix
        assert isinstance(found, torch.Tensor)
        values = F.pad(found.detach().float(), (0, padded(found.shape[1]) - found.shape[1]))
        data = as_bytes(values)
        self.copies.append(VectorCopy(matrix, data, found.shape, values.shape[1]))
        return self.draft.constant(data)

    def weight(self, weight: LinearWeight) -> Placed:
        """A weight or, of three dimensions, a stack of weights in kernel order."""
        key = weight.key if isinstance(weight, DeferredWeight) else id(weight)
        if key not in self._placed:
            pack_it = pack_stack if len(weight.shape) == 3 else pack
            packed = (pack_nothing if self.rehearsal else pack_it)(weight, self._torch_dtype)
            self.weight_bytes += packed.num_bytes
            parts = (packed.data, packed.scale, packed.sums)
            refs = [None if part is None else self.draft.constant(part) for part in parts]
            self._note_copy(weight, packed)  # which keeps `weight`, so that its id stays its own
            self._placed[key] = Placed(packed, (refs[0], refs[1], refs[2]))
            if isinstance(weight, torch.Tensor) and not self.rehearsal:
                weight.untyped_storage().resize_(0)
        return self._placed[key]

    def _note_copy(self, weight: LinearWeight, packed: PackedWeight) -> None:
        count = weight.shape[0] if len(weight.shape) == 3 else 0
        source, derive = weight, None
        if isinstance(weight, DeferredWeight) and weight.origin is not None:
            source, derive = weight.origin
        self.copies.append(MatrixCopy(source, packed, count, self._torch_dtype, derive))

    def multiply(
        self, x: Value, weight: Placed, bias: Ref, *, out_f32: bool = False, groups: Ref = None
    ) -> Value:
        """Rows of x times a weight; with `groups`, each group of rows times its matrix."""
        self.expect(x, "a linear")
        packed, (data, col_scale, sums) = weight.packed, weight.refs
        if packed.cols != x.cols:
            raise Unsupported(f"a linear of {packed.cols} inputs on rows of {x.cols}")
        out = self.new(packed.rows, "f32" if out_f32 else self.dtype, x)
        source: Ref = x.id
        row_scale: Ref = None
        row_bytes = padded(x.cols) * ELEMENT_BYTES[self.dtype]
        if packed.kind != "dense":
            row_bytes = _level_bytes(packed)
            source, row_scale, row_sums = self._quantise(x, packed)
            sums = sums if packed.kind == "int8" else row_sums
        buffers = (source, data, bias, out.id, row_scale, col_scale, sums, groups)
        sizes = packed.words, padded(packed.rows), int(out.dtype == "f32" != self.dtype)
        kind = _LINEAR[WEIGHT_KINDS.index(packed.kind)]
        layout = packed.group, row_bytes, 0, 0, padded(packed.rows)
        self.note(kind, out, buffers, (*sizes, *layout), type_=self.dtype)
        return out

    def multiply_heads(
        self, x: Value, weight: Placed, out: Value, groups: Ref, steps: tuple[int, int]
    ) -> None:
        """Each head's columns of x times its matrix, into its columns of out.

        Heads begin every `steps` columns of x and of out; what a head reads and makes are multiples
        of 32 columns.
        """
        packed, size = weight.packed, ELEMENT_BYTES[self.dtype]
        assert packed.kind == "dense"
        assert packed.rows == padded(packed.rows)
        assert packed.cols == padded(packed.cols)
        buffers = (x.id, weight.refs[0], None, out.id, None, None, None, groups)
        layout = padded(x.cols) * size, steps[0] * size, steps[1], padded(out.cols)
        sizes = (packed.words, packed.rows, 0, packed.group, *layout)
        self.note(Kind.LINEAR, x, buffers, sizes, type_=self.dtype)

    def gather_levels(
        self, x: Value, places: Value, pair: Ref, chosen: int, weight: PackedWeight
    ) -> None:
        """Quantise x, and gather that for `places`: only a product with `weight` may read those."""
        made, levels = self._quantise(x, weight), self._levels(places, weight)
        sizes = _level_bytes(weight), chosen, _num_groups(weight)
        self.note(Kind.GATHER_LEVELS, places, (*made, pair, *levels), sizes)
        self._quantised[places.id, weight.kind, weight.group] = levels

    def _levels(self, x: Value, weight: PackedWeight) -> tuple[Ref, Ref, Ref]:
        """Room for levels, scales and group sums of x."""
        rows, groups = self.num_rows(x.rows, x.times), _num_groups(weight)
        levels, scale = (self.draft.buffer(rows * n) for n in (_level_bytes(weight), 4))
        return levels, scale, self.draft.buffer(rows * groups * 4) if groups else None

    def _quantise(self, x: Value, weight: PackedWeight) -> tuple[Ref, Ref, Ref]:
        """Levels, scales and group sums of x; shared by the linears that read it."""
        key = x.id, weight.kind, weight.group
        if key not in self._quantised:
            levels, scale, sums = self._levels(x, weight)
            how = weight.group, int(weight.kind == "int8"), _level_bytes(weight)
            maker = self._makers.pop(x.id, None)
            if maker is None:
                self.note(Kind.QUANTISE, x, (x.id,), (x.cols,))
                maker = self.draft.calls[-1]
            maker.buffers = (*_fill(maker.buffers, None), levels, scale, sums)
            maker.sizes = (*_fill(maker.sizes, 0), *how)
            self._quantised[key] = levels, scale, sums
        return self._quantised[key]


def _level_bytes(weight: PackedWeight) -> int:
    """Of a quantised row that is multiplied by `weight`."""
    return weight.words * (4 if weight.kind == "int8" else 8)


def _num_groups(weight: PackedWeight) -> int:
    """Of a row, each with a sum of its own."""
    return _level_bytes(weight) // weight.group if weight.group else 0


def _fill(parts: tuple[T, ...], value: T) -> tuple[T, ...]:
    """With `value` up to where the quantising begins."""
    assert len(parts) <= _FIRST_OF_LEVELS
    return parts + (value,) * (_FIRST_OF_LEVELS - len(parts))
