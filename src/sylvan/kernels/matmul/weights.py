"""Quantised weights as PyTorch tensors; `pack` converts them to kernel order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.matmul.codes import Code, bits_of, middle_of, nibbles, values_of, widened

GROUP_SIZES = (32, 64, 128)
_BLOCK = 4096
_FP8_MAX = 448.0
FP8_GROUP = 128  # inputs per scale of matrices that `takes_fp8`
SUPERBLOCK = 256  # inputs per step of scales that are multiples of one
_HALF_MAX = 65504.0

PackKind = Literal["dense", "int8", "int4", "coded"]


@dataclass(frozen=True, slots=True)
class Form:
    """Storage form of a matrix; only matrices of the same form can be concatenated.

    Attributes:
        kind: Kind of kernel that multiplies by it.
        group: Inputs that share a scale; 0: the whole row.
        code: Name of the code of a `CodedWeight`, else "".
        scale: Dtype of the scales of a `CodedWeight`; int8: multiples of a step.
        zeros: Whether each group has a zero point.
        shifts: Whether each group has a shift.
        ordered: Whether inputs are permuted.
    """

    kind: PackKind = "dense"
    group: int = 0
    code: Code | Literal[""] = ""
    scale: torch.dtype = torch.float32
    zeros: bool = False
    shifts: bool = False
    ordered: bool = False

    def __str__(self) -> str:
        words = f"{self.code} codes" if self.code else str(self.kind)
        words += " with zero points" if self.zeros else ""
        words += " with shifts" if self.shifts else ""
        return f"{words} in groups of {self.group}" if self.group else words


DENSE = Form()


class QuantisedWeight(ABC):
    """A quantised matrix (N, K), or a stack of E, whose tensors have a leading dimension E."""

    __slots__ = ()

    q: torch.Tensor
    scale: torch.Tensor

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""

    @property
    @abstractmethod
    def form(self) -> Form:
        """Storage form."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors with a dimension of outputs."""
        return self.q, self.scale

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The dimension of outputs in each of `tensors`, counted from the last."""
        return (-2,) * len(self.tensors)

    @property
    @abstractmethod
    def column_multiple(self) -> int:
        """Inputs can only be sliced at multiples of this."""

    @abstractmethod
    def like(self, tensors: Sequence[torch.Tensor]) -> Self:
        """A copy with other `tensors`."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> Self:
        """Slice the inputs; both bounds are multiples of `column_multiple`."""

    @abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantised rows of one matrix, float32."""

    def __getitem__(self, index: int | slice) -> Self:
        """One matrix of a stack, or some rows of a matrix."""
        return self.like([part[index] for part in self.tensors])

    def numbers(self) -> torch.Tensor:
        """The dequantised matrix, float32, of its `shape`."""
        if len(self.shape) == 3:
            return torch.stack([self[index].numbers() for index in range(self.shape[0])])
        return self.rows(torch.arange(self.shape[0], device=self.q.device))

    def to(self, device: torch.device | str) -> Self:
        """The weight on a device."""
        return self.like([part.to(device) for part in self.tensors])

    def stacked(self, count: int) -> Self:
        """A stack of `count` matrices with equally many rows."""
        return self.like([part.unflatten(0, (count, -1)) for part in self.tensors])

    def flat(self) -> Self:
        """A stack as one matrix, over the same memory."""
        return self.like([part.view(-1, *part.shape[2:]) for part in self.tensors])


def join(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Concatenate matrices with equal inputs along the outputs.

    Raises:
        ValueError: Their storage forms differ.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, CodedWeight):
        parts = _alike([part for part in parts if isinstance(part, CodedWeight)], len(parts))
        first = parts[0]
    if any(part.form != first.form for part in parts):
        raise ValueError("quantised in different ways")
    columns = zip(*(part.tensors for part in parts), first.row_dims, strict=True)
    return first.like([torch.cat(column[:-1], column[-1]) for column in columns])


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight(QuantisedWeight):
    """Symmetric int8, one scale per output channel: w = q * scale[:, None]."""

    # In a stack of E matrices, each tensor has a leading dimension E.
    q: torch.Tensor  # (N, K) int8; `quantise_int8` uses [-127, 127], checkpoints also -128
    scale: torch.Tensor  # (N,) float32

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.q.shape

    @property
    def form(self) -> Form:
        return Form("int8")

    @property
    def row_dims(self) -> tuple[int, ...]:
        return -2, -1

    @property
    def column_multiple(self) -> int:
        return 1

    def like(self, tensors: Sequence[torch.Tensor]) -> Int8Weight:
        return Int8Weight(*tensors)

    def columns(self, start: int, stop: int) -> Int8Weight:
        return Int8Weight(self.q[..., start:stop].contiguous(), self.scale)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantised rows, float32."""
        index = index.long()
        return self.q[index].float() * self.scale[index, None]


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight(QuantisedWeight):
    """Symmetric int4 around 8, one scale per `group` inputs: w = (q - 8) * scale."""

    q: torch.Tensor  # (N, K / 2) uint8; input 2i in the low nibble, 2i + 1 in the high one
    scale: torch.Tensor  # (N, K / group) float32
    group: int

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return torch.Size((*self.q.shape[:-1], self.q.shape[-1] * 2))

    @property
    def form(self) -> Form:
        return Form("int4", self.group)

    @property
    def column_multiple(self) -> int:
        return self.group

    def like(self, tensors: Sequence[torch.Tensor]) -> Int4Weight:
        q, scale = tensors
        return Int4Weight(q, scale, self.group)

    def columns(self, start: int, stop: int) -> Int4Weight:
        q, scale = (
            self.q[..., start // 2 : stop // 2],
            self.scale[..., start // self.group : stop // self.group],
        )
        return Int4Weight(q.contiguous(), scale.contiguous(), self.group)

    def levels(self) -> torch.Tensor:
        """Levels q - 8 as int8, (N, K)."""
        pairs = torch.stack((self.q & 15, self.q >> 4), -1).flatten(-2)
        return pairs.to(torch.int8) - 8

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantised rows, float32."""
        index = index.long()
        part = Int4Weight(self.q[index], self.scale[index], self.group)
        return part.levels().float() * part.scale.repeat_interleave(self.group, -1)


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight(QuantisedWeight):
    """A weight-only quantised matrix: codes of 4, 6 or 8 bits; inputs are not quantised.

    w = (value - zero) * scale + shift. As in ggml's K-quants, scales and shifts may be int8, to be
    multiplied by a step for each `SUPERBLOCK` inputs; such products are exact in float32.

    Attributes:
        q: uint8: (N, K / 2) for 4-bit codes, input 2i in the low nibble and 2i + 1 in the high
            one; else (N, K).
        scale: (N, G), float16, bfloat16 or float32; int8 with `step`.
        code: Meaning of the codes.
        group: Inputs that share a scale; 0: the whole row, with G = 1.
        zero: uint8 (N, G); None: the middle of the integer range.
        shift: float32 (N, G), added per group; int8 with `step`. None: nothing is added.
        order: int32 (K,): input i of q is input order[i] of the matrix; None: not permuted.
        fp8_inputs: GPU kernels also round inputs to e4m3.
        step: float16 (N, K / 256), which `scale` counts; None: scales are numbers of their own.
        shift_step: The same for `shift`.
    """

    q: torch.Tensor
    scale: torch.Tensor
    code: Code
    group: int
    zero: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    order: torch.Tensor | None = None
    fp8_inputs: bool = False
    step: torch.Tensor | None = None
    shift_step: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.q.shape[:-1], self.q.shape[-1] * (8 // bits_of(self.code))))

    @property
    def form(self) -> Form:
        more = (part is not None for part in (self.zero, self.shift, self.order))
        return Form("coded", self.group, self.code, self.scale.dtype, *more)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.scale, *(x for _, x in self.others())

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors with a dimension of outputs besides codes and scales, by name."""
        for name in ("zero", "shift", "step", "shift_step"):
            if (part := getattr(self, name)) is not None:
                yield name, part

    @property
    def column_multiple(self) -> int:
        return self.shape[-1] if self.order is not None else self.group or 2

    def like(self, tensors: Sequence[torch.Tensor]) -> CodedWeight:
        q, scale, *more = tensors
        names = [name for name, _ in self.others()]
        return replace(self, q=q, scale=scale, **dict(zip(names, more, strict=True)))

    def to(self, device: torch.device | str) -> CodedWeight:
        """The weight on a device, in a form for its kernels."""
        weight = self if torch.device(device).type == "cpu" else self.for_devices()
        order = None if self.order is None else self.order.to(device)
        return replace(weight.like([part.to(device) for part in weight.tensors]), order=order)

    def for_devices(self) -> CodedWeight:
        """The same numbers without steps and codes of 6 bits, which only CPU kernels read."""
        weight = self.expanded()
        return _widened(weight, "int8") if weight.code == "int6" else weight

    def expanded(self) -> CodedWeight:
        """The same numbers with float32 scales and shifts, without steps."""
        if self.step is None:
            return self
        scale, shift = _multiples(self.scale, self.step), self.shift
        if shift is not None:
            assert self.shift_step is not None
            shift = _multiples(shift, self.shift_step)
        return replace(self, scale=scale, shift=shift, step=None, shift_step=None)

    def columns(self, start: int, stop: int) -> CodedWeight:
        if self.step is not None and (start % SUPERBLOCK or stop % SUPERBLOCK):
            return self.expanded().columns(start, stop)
        each = 8 // bits_of(self.code)
        parts = [self.q[..., start // each : stop // each]]
        for name, part in (("scale", self.scale), *self.others()):
            size = SUPERBLOCK if name.endswith("step") else self.group
            parts.append(part[..., start // size : stop // size] if size else part)
        return self.like([part.contiguous() for part in parts])

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        part = self.like([tensor[index.long()] for tensor in self.tensors]).expanded()
        values = values_of(part.q, self.code)
        group = self.group or values.shape[-1]
        zero = middle_of(self.code) if part.zero is None else part.zero.float()[..., None]
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % group))
        scaled = (padded.unflatten(-1, (-1, group)) - zero) * part.scale.float()[..., None]
        if part.shift is not None:
            scaled = scaled + part.shift[..., None]
        found = scaled.flatten(-2)[..., : values.shape[-1]]
        if self.order is None:
            return found
        out = torch.empty_like(found)
        out[..., self.order.long()] = found
        return out


def _multiples(levels: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Shape: (N, G) and (N, S) to float32 (N, G)."""
    blocks = levels.float().unflatten(-1, (step.shape[-1], -1))
    return (blocks * step.float()[..., None]).flatten(-2)


def takes_fp8(weight: CodedWeight) -> bool:
    """Whether a matrix or stack can be multiplied by FP8 rows."""
    outputs, inputs = weight.shape[-2:]
    plain = weight.order is None and weight.zero is None and weight.shift is None
    sizes = inputs % FP8_GROUP == 0 and outputs % 16 == 0
    return weight.code == "fp8_e4m3" and weight.group in (0, FP8_GROUP) and plain and sizes


def as_codes(weight: QuantisedWeight) -> CodedWeight:
    """The same weight as weight-only quantised; shares memory if possible."""
    if isinstance(weight, Int8Weight):
        q = (weight.q.view(torch.uint8) ^ 128).contiguous()
        return CodedWeight(q, weight.scale[..., None].contiguous(), "int8", 0)
    if isinstance(weight, Int4Weight):
        return CodedWeight(weight.q, weight.scale, "int4", weight.group)
    assert isinstance(weight, CodedWeight)
    return weight


def _alike(parts: Sequence[CodedWeight], count: int) -> Sequence[CodedWeight]:
    """Convert to a common storage form without changing values, e.g. 4-bit codes to 6-bit ones."""
    if len(parts) != count:
        raise ValueError("quantised in different ways")
    orders = [part.order for part in parts if part.order is not None]
    if orders and not (len(orders) == count and all(order.equal(orders[0]) for order in orders)):
        raise ValueError("quantised with inputs in different orders")
    if any(part.step is None for part in parts):
        parts = [part.expanded() for part in parts]
    if len({part.code for part in parts}) > 1:
        few = all(part.code in _UP_TO_SIX_BITS and part.zero is None for part in parts)
        parts = [_widened(part, "int6" if few else "int8") for part in parts]
    groups = {part.group or part.shape[-1] for part in parts}
    if len({part.group for part in parts}) > 1:
        parts = [_regrouped(part, min(groups)) for part in parts]
    types = {part.scale.dtype for part in parts}
    dtype = types.pop() if len(types) == 1 else torch.float32
    zeros = any(part.zero is not None for part in parts)
    shifts = any(part.shift is not None for part in parts)
    made: list[CodedWeight] = []
    for part in parts:
        zero, shift, step, shape = part.zero, part.shift, part.shift_step, part.scale.shape
        if zeros and zero is None:
            zero = torch.full(shape, int(middle_of(part.code)), dtype=torch.uint8)
        if shifts and shift is None:
            stepped = part.step is not None
            shift = torch.zeros(shape, dtype=torch.int8 if stepped else torch.float32)
            step = part.step
        scale = part.scale.to(dtype)
        made.append(replace(part, scale=scale, zero=zero, shift=shift, shift_step=step))
    return made


_UP_TO_SIX_BITS: Sequence[Code] = ("int4", "uint4", "int6")


def _widened(part: CodedWeight, code: Literal["int6", "int8"]) -> CodedWeight:
    """Convert codes to integers of 6 or 8 bits."""
    if part.code == code:
        return part
    if part.zero is not None and part.code == "int4":
        return replace(part, q=nibbles(part.q), code=code)
    found = widened(part.q, part.code, code)
    if found is None:
        raise ValueError("quantised in different ways")
    q, times = found
    if times == 1:
        return replace(part, q=q, code=code)
    part = part.expanded()
    return replace(part, q=q, scale=part.scale.float() / times, code=code)


def _regrouped(part: CodedWeight, group: int) -> CodedWeight:
    """Convert to one scale per `group` inputs by repeating the scales of larger groups."""
    cols = part.shape[-1]
    times = (part.group or cols) // group
    if (part.group or cols) % group or cols % group:
        raise ValueError("quantised in groups of different sizes")
    made = [
        x if name.endswith("step") else x.repeat_interleave(times, -1)[..., : cols // group]
        for name, x in (("scale", part.scale), *part.others())
    ]
    return replace(part.like([part.q, *made]), group=group)


@dataclass(frozen=True, slots=True, eq=False)
class PlainRows:
    """Plain numbers that are rounded to `form` while they are packed, a few rows at a time.

    `read` yields consecutive rows (n, K), bfloat16 or float32; of a stack, those of its matrices
    one after another.
    """

    form: Form
    read: Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class DeferredWeight:
    """A weight that is loaded when it is packed, so that only one is in memory at a time.

    `key` is equal for tied weights, which are packed once. `origin` describes the derivation from
    another weight, if any. With `plain`, packing needs no second copy of the whole weight.
    """

    shape: torch.Size
    load: Callable[[], torch.Tensor | QuantisedWeight]
    key: str
    origin: tuple[LinearWeight, Callable[[torch.Tensor], torch.Tensor]] | None = None
    plain: PlainRows | None = None


def quantise_int8(weight: torch.Tensor) -> Int8Weight:
    """Round a float matrix (N, K) to int8 with the largest magnitude of each row at 127.

    A stack of matrices (E, N, K) becomes one of quantised matrices.
    """
    if weight.dim() == 3:
        flat = quantise_int8(weight.flatten(0, 1))
        return Int8Weight(*(part.unflatten(0, weight.shape[:2]) for part in (flat.q, flat.scale)))
    q = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0], dtype=torch.float32)
    for rows in _blocks(len(q)):
        w = weight[rows].float()
        scale[rows] = (w.abs().amax(1) / 127).clamp_min(1e-30)
        q[rows] = (w / scale[rows, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8Weight(q, scale)


def quantise_int4(weight: torch.Tensor, group: int = 64) -> Int4Weight:
    """Round a float matrix (N, K) to 4 bits; K must be a multiple of `group`.

    A group's value of largest magnitude becomes level -8, which uses the extra negative level (as
    GGUF's Q4_0 does). Stacks as in `quantise_int8`.
    """
    if weight.dim() == 3:
        flat = quantise_int4(weight.flatten(0, 1), group)
        q, scale = (part.unflatten(0, weight.shape[:2]) for part in (flat.q, flat.scale))
        return Int4Weight(q, scale, group)
    count, cols = weight.shape
    assert cols % group == 0, f"{cols} inputs do not divide into groups of {group}"
    q = torch.empty((count, cols // 2), dtype=torch.uint8)
    scale = torch.empty((count, cols // group), dtype=torch.float32)
    for rows in _blocks(count):
        w = weight[rows].float().unflatten(1, (-1, group))
        extreme = w.gather(2, w.abs().argmax(2, keepdim=True))
        inverse = torch.where(extreme == 0, 0.0, -8 / extreme)
        levels = ((w * inverse).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
        q[rows] = levels[:, ::2] | levels[:, 1::2] << 4
        scale[rows] = extreme.squeeze(2) / -8
    return Int4Weight(q, scale, group)


def quantise_int4_codes(weight: torch.Tensor, group: int) -> CodedWeight:
    """The levels of `quantise_int4` with float16 scales, for unquantised inputs."""
    found = quantise_int4(weight, group)
    scale = found.scale.clamp(-_HALF_MAX, _HALF_MAX).half()
    return CodedWeight(found.q, scale, "int4", group)


def quantise_fp8(weight: torch.Tensor) -> CodedWeight:
    """Round a float matrix (N, K) to e4m3, the largest magnitude of each row at 448; or a stack."""
    if weight.dim() == 3:
        return quantise_fp8(weight.flatten(0, 1)).stacked(weight.shape[0])
    q = torch.empty(weight.shape, dtype=torch.uint8)
    scale = torch.empty((weight.shape[0], 1), dtype=torch.float32)
    for rows in _blocks(len(q)):
        w = weight[rows].float()
        scale[rows] = (w.abs().amax(1, keepdim=True) / _FP8_MAX).clamp_min(1e-30)
        found = (w / scale[rows]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        q[rows] = found.view(torch.uint8)
    return CodedWeight(q, scale, "fp8_e4m3", 0)


def _blocks(count: int) -> list[slice]:
    """Slices of rows whose float32 copies stay small."""
    return [slice(first, first + _BLOCK) for first in range(0, count, _BLOCK)]
