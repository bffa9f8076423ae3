"""Generates the C++ structs of ops, and a digest that ties a compiled library to them.

Standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from enum import IntEnum

from sylvan.kernels.native.schema import Op, Operands, StructField, fields_of, is_group, members_of

_ELEMENTS = {
    "row": "void",
    "packed": "void",
    "f32": "float",
    "i32": "int32_t",
    "i64": "int64_t",
    "u8": "uint8_t",
}
_NUMBERS = {"int": "int32_t", "bool": "int32_t", "float": "float"}
_BYTES = {"row": 0, "f32": 4, "i32": 4, "i64": 8, "u8": 1}
_LETTERS = {
    "C": ("cols", "channels"),
    "E": ("num_experts",),
    "H": ("num_heads",),
    "K": ("top_k",),
    "N": ("states",),
}
_DIMENSIONS = 3  # of a row, at most
_TOP = """\
// Made from opset.py by codegen.py; changes here are lost.
#pragma once
#include <cstdint>

// Index into the buffer table, -1: absent. T void: of the rows' type, or packed.
template <class T> struct Buf {
    int32_t index;
    bool present() const { return index >= 0; }
};

struct Op {
    int32_t kind, rows, dtype;
    int32_t times;  // rows of the op for each of its run-time row count
    int32_t waits;  // whether threads wait until the ops before it are complete
};

// What an operand must be, checked when a program is loaded: see check.cpp.
enum class Rule : int32_t { NUMBER, CHOICE, BUFFER, OPTIONAL };
struct OperandRule {
    const char* name;
    Rule rule;
    int32_t choices;  // an operand that is one of these numbers from 0 on
    // of a buffer: bytes of a number (0: of the rows' type, -1: its size is not known), whether
    // each row has as many, the operands whose product is how many (-1: none), and whether rows are
    // padded
    int32_t bytes, per_row, words[3], padded;
};
"""


def header(ops: Sequence[type[Op]]) -> str:
    """Return the C++ header of all ops: enums, structs of operands, and the list of kernels."""
    operands = [field for op in ops for field in fields_of(op)]
    enums = {f.type.__name__: f.type for f in operands if f.kind == "enum"}
    groups = {hint.__name__: hint for op in ops for _, hint in members_of(op) if is_group(hint)}
    most = max(len(fields_of(op)) for op in ops)
    names = [snake(op.__name__) for op in ops]
    text = "\n".join(
        [
            _TOP,
            *(_enum(name, kind) for name, kind in enums.items()),
            *(_struct(group) for group in groups.values()),
            *(_struct(op) for op in ops),
            *(_rules(op) for op in ops),
            f"constexpr int OPERAND_WORDS = {most};\n",
            f"enum Kind : int32_t {{ {', '.join(n.upper() for n in names)}, N_KINDS }};\n",
            f"#define SYLVAN_OPS(X) {' '.join(f'X({name})' for name in names)}\n",
        ]
    )
    return f'{text}\n#define SYLVAN_OPS_DIGEST "{_digest(text)}"\n'


def digest(ops: Sequence[type[Op]]) -> str:
    """Return the digest of everything that the library and the program builders must agree on."""
    return header(ops).rsplit('"', 2)[1]


def snake(name: str) -> str:
    """Convert `RmsNorm` to `rms_norm`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _digest(text: str) -> str:
    code = re.sub(r"\s*//[^\n]*", "", text)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _enum(name: str, kind: type[IntEnum]) -> str:
    values = ", ".join(f"{value.name} = {value.value}" for value in kind)
    return f"enum class {name} : int32_t {{ {values} }};\n"


def _struct(cls: type[Operands]) -> str:
    """Fields of a base op come first."""
    name, base = cls.__name__, cls.__base__
    assert base is not None
    is_op, own = issubclass(cls, Op), {f.path[0]: f for f in fields_of(cls)}
    known = {} if base in (Op, Operands) else dict(members_of(base))
    added = [(member, hint) for member, hint in members_of(cls) if member not in known]
    if not added:
        return f"struct {name} : {base.__name__} {{}};\n"
    lines = [f"struct {name}{f' : {base.__name__}' if is_op else ''} {{"]
    for member, hint in added:
        lines.append(f"    {hint.__name__} {member};" if is_group(hint) else _line(own[member]))
    size = f"{'sizeof(Op) + ' if is_op else ''}4 * {len(fields_of(cls))}"
    return "\n".join([*lines, "};", f"static_assert(sizeof({name}) == {size});", ""])


def _rules(op: type[Op]) -> str:
    """Return the C++ table of rules for the operands of an op."""
    lines = "".join(f"    {{{_rule(op, field)}}},\n" for field in fields_of(op))
    return f"constexpr OperandRule {snake(op.__name__)}_rules[] = {{\n{lines}}};\n"


def _rule(op: type[Op], field: StructField) -> str:
    name, unknown = f'"{field.name}"', "-1, 0, {-1, -1, -1}, 0"
    if field.kind in ("bool", "enum"):
        choices = 2 if field.kind == "bool" else 1 + max(field.type)
        return f"{name}, Rule::CHOICE, {choices}, {unknown}"
    if field.kind != "buffer":
        return f"{name}, Rule::NUMBER, 0, {unknown}"
    rule = "Rule::OPTIONAL" if field.optional else "Rule::BUFFER"
    if (shape := _counted(op, field)) is None:
        return f"{name}, {rule}, 0, {unknown}"
    per_row, words = shape
    padded = per_row and len(words) == 1 and field.type.element == "row"
    listed = ", ".join(map(str, [*words, *[-1] * (_DIMENSIONS - len(words))]))
    size = _BYTES[field.type.element]
    return f"{name}, {rule}, 0, {size}, {int(per_row)}, {{{listed}}}, {int(padded)}"


def _counted(op: type[Op], field: StructField) -> tuple[bool, list[int]] | None:
    """Whether a buffer has numbers for each row, and the operands whose product counts them."""
    ints = {f.path: i for i, f in enumerate(fields_of(op)) if f.kind == "int"}
    if field.type.element not in _BYTES:
        return None
    parts = field.type.shape.split(", ")
    per_row = parts[0] == "T"
    if per_row and (stride := f"{field.path[-1]}_stride") in _required(op):
        return True, [ints[stride,]]
    words: list[int] = []
    for part in parts[parts[0] in ("T", "S") :]:  # there is at least one slot
        names = _LETTERS.get(part, (part,))
        found = [
            ints[at] for name in names for at in ((*field.path[:-1], name), (name,)) if at in ints
        ]
        if not found:
            return None
        words.append(found[0])
    return (per_row, words) if len(words) <= _DIMENSIONS else None


def _required(op: type[Op]) -> set[str]:
    """Return the names of the fields of an op that have no default."""
    return {part.name for part in fields(op) if part.default is MISSING}


def _line(field: StructField) -> str:
    if field.kind == "buffer":
        about, absent = field.type, ", or absent" if field.optional else ""
        note = f"  // {about.access}, {about.element} [{about.shape}]{absent}"
        return f"    Buf<{_ELEMENTS[about.element]}> {field.name};{note}"
    kind = field.type.__name__ if field.kind == "enum" else _NUMBERS[field.kind]
    return f"    {kind} {field.name};"
