"""Describes the configuration tree: path, type, default and documentation of every field."""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from sylvan.config.tree import Config, Section
from sylvan.config.values import Secret

Tree = TypeVar("Tree", bound=Section)


@dataclass(frozen=True, slots=True)
class Member:
    """One alternative of a field's type: `base` with its bounds and unit."""

    base: object
    meta: msgspec.Meta | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the tree. `default` is `msgspec.NODEFAULT` if a value is required."""

    path: str
    type: Any
    default: object
    doc: str

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.path.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return "SYLVAN_" + self.path.replace(".", "__").upper()

    @property
    def members(self) -> tuple[Member, ...]:
        """The alternatives of its type, in order."""
        return members(self.type)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the type allows."""
        return tuple(word for m in self.members for word in _words(m.base))

    @property
    def is_switch(self) -> bool:
        """Whether the flag may be used without a value, which means true."""
        return any(m.base is bool for m in self.members)

    @property
    def is_secret(self) -> bool:
        """Whether the value must never be shown."""
        return any(Secret in (m.base, *get_args(m.base)) for m in self.members)

    @property
    def type_text(self) -> str:
        """The type, for display: `int >= 1 | auto`."""
        return " | ".join(_member_text(m) for m in self.members)


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """A section. `optional` ones are absent by default; setting one turns its feature on."""

    path: str
    type: type[Section]
    doc: str
    optional: bool


@cache
def fields(root: type[Section] = Config) -> Mapping[str, Field]:
    """All fields by path, in the order of the tree; those of the root section first."""
    found = [field for info in sections(root).values() for field in _own_fields(info)]
    return {field.path: field for field in found}


@cache
def sections(root: type[Section] = Config) -> Mapping[str, SectionInfo]:
    """All sections by path; the root is ""."""
    infos = {"": SectionInfo("", root, inspect.getdoc(root) or "", optional=False)}
    for name, kind in get_type_hints(root).items():
        section = _section_of(kind)
        if section:
            doc = inspect.getdoc(section) or ""
            infos[name] = SectionInfo(name, section, doc, optional=kind is not section)
    return infos


def members(kind: Any) -> tuple[Member, ...]:
    """Split a type at its `|`."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return tuple(m for part in get_args(kind) for m in members(part))
    if origin is Annotated:
        base, *extra = get_args(kind)
        meta = next((item for item in extra if isinstance(item, msgspec.Meta)), None)
        return (Member(base, meta),)
    return (Member(kind),)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def get(config: Section, path: str) -> object:
    """The value at `path`; None inside an absent section."""
    value: Any = config
    for part in path.split("."):
        if value is None:
            return None
        value = getattr(value, part)
    return value


def replaced(config: Tree, values: Mapping[str, object]) -> Tree:
    """A copy of the tree with `values` (by path) replaced."""
    changes: dict[str, Any] = {}
    for path, value in values.items():
        name, _, leaf = path.partition(".")
        if leaf:
            part = changes.get(name, getattr(config, name))
            changes[name] = msgspec.structs.replace(part, **{leaf: value})
        else:
            changes[name] = value
    return msgspec.structs.replace(config, **changes)


def _own_fields(info: SectionInfo) -> Iterable[Field]:
    docs = _field_docs(info.type)
    hints = get_type_hints(info.type, include_extras=True)
    prefix = f"{info.path}." if info.path else ""
    for item in msgspec.structs.fields(info.type):
        kind = hints[item.name]
        if _section_of(kind) is None:
            default = item.default
            if item.default_factory is not msgspec.NODEFAULT:
                default = item.default_factory()
            yield Field(prefix + item.name, kind, default, docs.get(item.name, ""))


def _section_of(kind: Any) -> type[Section] | None:
    for part in members(kind):
        if isinstance(part.base, type) and issubclass(part.base, Section):
            return part.base
    return None


@cache
def _field_docs(section: type[Section]) -> Mapping[str, str]:
    """Read the docs of the fields of a class and its bases from their source."""
    inherited = [_field_docs(base) for base in section.__bases__ if base not in (Section, object)]
    docs = {name: doc for found in inherited for name, doc in found.items()}
    body = next(
        node.body
        for node in ast.walk(_module_tree(section.__module__))
        if isinstance(node, ast.ClassDef) and node.name == section.__name__
    )
    for field, text in itertools.pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as doc)),
            ):
                docs[name] = " ".join(doc.split())
            case _:
                pass
    return docs


@cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _words(base: Any) -> tuple[str, ...]:
    return get_args(base) if get_origin(base) is Literal else ()


_NUMBERS: tuple[object, ...] = (int, float)
_NAMES: Mapping[object, str] = {
    str: "text",
    bool: "true | false",
    types.NoneType: "none",
    Secret: "secret",
}


def _member_text(member: Member) -> str:
    if words := _words(member.base):
        return " | ".join(words)
    if get_origin(member.base) is tuple:
        (item, *_) = members(get_args(member.base)[0])
        return f"list of {_member_text(item)}" if item.base in _NUMBERS else "list"
    if get_origin(member.base) is dict:
        return "name=value,..."
    name = _NAMES.get(member.base, getattr(member.base, "__name__", str(member.base)))
    if member.meta is None:
        return name
    unit = (member.meta.extra or {}).get("unit")
    return " ".join([{"bytes": "size"}.get(unit or "", unit or name), *_bounds(member)])


def _bounds(member: Member) -> Iterable[str]:
    meta = member.meta
    assert meta is not None
    unit = (meta.extra or {}).get("unit")
    for sign, bound in ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le)):
        if bound is not None:
            yield f"{sign} {size_text(int(bound)) if unit == 'bytes' else f'{bound:g}'}"
    if meta.pattern is not None:
        yield f"like {meta.pattern}"


def size_text(num_bytes: int) -> str:
    """A size for display, exact if it is a whole number of a binary unit."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"
