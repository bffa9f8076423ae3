"""Generates the C++ structs of ops, and a digest that ties a compiled library to them.

Standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
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
"""


def header(ops: Sequence[type[Op]]) -> str:
    """Return the C++ header of all ops: enums, structs of operands, and the list of kernels."""
    fields = [field for op in ops for field in fields_of(op)]
    enums = {f.type.__name__: f.type for f in fields if f.kind == "enum"}
    groups = {hint.__name__: hint for op in ops for _, hint in members_of(op) if is_group(hint)}
    most = max(len(fields_of(op)) for op in ops)
    names = [snake(op.__name__) for op in ops]
    text = "\n".join(
        [
            _TOP,
            *(_enum(name, kind) for name, kind in enums.items()),
            *(_struct(group) for group in groups.values()),
            *(_struct(op) for op in ops),
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


def _line(field: StructField) -> str:
    if field.kind == "buffer":
        about, absent = field.type, ", or absent" if field.optional else ""
        note = f"  // {about.access}, {about.element} [{about.shape}]{absent}"
        return f"    Buf<{_ELEMENTS[about.element]}> {field.name};{note}"
    kind = field.type.__name__ if field.kind == "enum" else _NUMBERS[field.kind]
    return f"    {kind} {field.name};"
