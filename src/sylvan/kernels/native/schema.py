"""Definition of step-program ops: dataclasses whose fields are operands.

`opset` lists the ops; `codegen` generates C++ structs with the same fields in the same order, and a
digest that both sides must share. A buffer field is annotated with its access; None is an absent
buffer. Standard library only: the build hook loads these files before anything is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_type_hints

BufferRef = int | None
"""A constant (negative: ~its index), a virtual buffer (>= 0), or None where it is absent."""

FieldKind = Literal["buffer", "int", "bool", "float", "enum"]
Access = Literal["read", "write", "update"]
Element = Literal["row", "packed", "f32", "i32", "i64", "u8"]
Rows = Literal["tokens", "outputs"]
RowType = Literal["bf16", "f32"]
ROWS: tuple[Rows, ...] = ("tokens", "outputs")
ROW_TYPES: tuple[RowType, ...] = ("bf16", "f32")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Definition of a buffer field: access by the op, element type and shape."""

    access: Access
    element: Element
    shape: str


def reads(element: Element, shape: str) -> Buffer:
    """A buffer that the op reads."""
    return Buffer("read", element, shape)


def writes(element: Element, shape: str) -> Buffer:
    """A buffer that the op writes."""
    return Buffer("write", element, shape)


def updates(element: Element, shape: str) -> Buffer:
    """A buffer that the op reads and writes, or writes in part."""
    return Buffer("update", element, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Operands of an op, or a group of operands that several ops share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op(Operands):
    """One call of a kernel, constant once it has been traced.

    Attributes:
        dtype: Of "row" buffers.
        rows: The row count of a step that it uses.
        times: Rows for each of `rows`.
        segment: Part of the program; a `Program` runs a range of them.
    """

    dtype: RowType = "f32"
    rows: Rows = "tokens"
    times: int = 1
    segment: int = 0


_C = TypeVar("_C", bound=type)
_NUMBERS: Mapping[type, FieldKind] = MappingProxyType({int: "int", bool: "bool", float: "float"})
_HEADER = {part.name for part in fields(Op)}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def operands(cls: _C) -> _C:
    """An op that the library has a kernel for, or a group of operands."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@dataclass(frozen=True, slots=True)
class StructField:
    """A number that the library reads, at its place in the struct."""

    path: tuple[str, ...]
    kind: FieldKind
    type: Any  # type of the field, or the `Buffer` of a buffer
    optional: bool = False

    @property
    def name(self) -> str:
        """Its path, joined."""
        return ".".join(self.path)

    def of(self, op: Operands) -> Any:
        """Its value."""
        found: Any = op
        for part in self.path:
            found = getattr(found, part)
        return found


@cache
def members_of(cls: type[Operands]) -> tuple[tuple[str, Any], ...]:
    """Its own fields and their types; a group of operands is one field.

    Raises:
        TypeError: a class without the decorator `operands`.
    """
    if "__dataclass_fields__" not in vars(cls):
        raise TypeError(f"{cls.__name__} is not decorated with @operands")
    hints = get_type_hints(cls, include_extras=True)
    own = [part.name for part in fields(cls) if not (part.name in _HEADER and issubclass(cls, Op))]
    return tuple((name, hints[name]) for name in own)


def is_group(hint: Any) -> bool:
    """Whether a field is a group of operands."""
    return isinstance(hint, type) and issubclass(hint, Operands)


@cache
def fields_of(cls: type[Operands]) -> tuple[StructField, ...]:
    """All operands of an op or a group in the order of its struct, those of groups in place.

    Raises:
        TypeError: a field of a type that structs cannot hold.
    """
    found: list[StructField] = []
    for name, hint in members_of(cls):
        if is_group(hint):
            inner = fields_of(hint)
            found += [StructField((name, *f.path), f.kind, f.type, f.optional) for f in inner]
        else:
            found.append(_field(cls, name, hint))
    return tuple(found)


def _field(cls: type[Operands], name: str, hint: Any) -> StructField:
    about = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Buffer)]
    if about:
        return StructField((name,), "buffer", about[0], type(None) in get_args(get_args(hint)[0]))
    if hint in _NUMBERS:
        return StructField((name,), _NUMBERS[hint], hint)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return StructField((name,), "enum", hint)
    raise TypeError(f"{cls.__name__}.{name}: {hint} is not a buffer, number or group of operands")


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer that an op uses."""

    name: str
    access: Access
    element: Element
    shape: str
    ref: int


def buffers_of(op: Op) -> Iterator[Operand]:
    """Its buffers, without absent ones."""
    for part in fields_of(type(op)):
        if part.kind == "buffer" and (ref := part.of(op)) is not None:
            about: Buffer = part.type
            yield Operand(part.name, about.access, about.element, about.shape, ref)
