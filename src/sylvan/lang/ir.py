"""The intermediate representation: what a program appends to its state.

Nodes are immutable and know nothing of backends; the interpreter and the tracer dispatch on
their types. `a + b` concatenates nodes and strings into an `ExprList`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sylvan.lang.choices import ChoicesMethod

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""
"""Regular expressions for the `dtype` of a gen."""


@dataclass(frozen=True, slots=True)
class Expr:
    """Base of all nodes."""

    def __add__(self, other: object) -> ExprList:
        return concatenate(self, other)

    def __radd__(self, other: object) -> ExprList:
        return concatenate(other, self)


@dataclass(frozen=True, slots=True)
class ExprList(Expr):
    """Nodes one after the other."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class ConstantText(Expr):
    """Text of the program."""

    value: str


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Text of the model. `params` are the sampling parameters that the call gave."""

    name: str | None
    params: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Gen({self.name!r})"


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The most likely of some choices."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    method: ChoicesMethod

    def __repr__(self) -> str:
        method = type(self.method).__name__
        return f"Select({self.name!r}, choices={list(self.choices)}, method={method})"


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """A chat message of `role` begins."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """The chat message ends."""

    role: str


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture: path, URL, bytes, or PIL image."""

    source: Any

    def __repr__(self) -> str:
        shown = f"{len(self.source)} bytes" if isinstance(self.source, bytes) else self.source
        return f"Image({shown})"


@dataclass(frozen=True, slots=True)
class Video(Expr):
    """Frames of a video file."""

    path: str
    num_frames: int


@dataclass(frozen=True, slots=True)
class Variable(Expr):
    """The value of a variable of `source`: in a trace a node, at run time a state."""

    name: str
    source: Any

    def __repr__(self) -> str:
        return f"Variable({self.name!r})"


@dataclass(frozen=True, slots=True)
class Argument(Expr):
    """An argument of a traced program whose value is not known."""

    name: str
    value: Any = None

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: int) -> Any:
        return self.value[index]

    def __bool__(self) -> bool:
        if self.value is None:
            raise TypeError(f"the value of argument {self.name!r} is not known while tracing")
        return bool(self.value)

    def __format__(self, spec: str) -> str:
        raise TypeError(
            f"argument {self.name!r} cannot be put in an f-string while tracing; "
            "append it with + instead"
        )

    def __repr__(self) -> str:
        return f"Argument({self.name!r})"


@dataclass(frozen=True, slots=True)
class Fork(Expr):
    """The state splits in `number` copies."""

    number: int


@dataclass(frozen=True, slots=True)
class GetForkItem(Expr):
    """One of the copies."""

    index: int


@dataclass(frozen=True, slots=True)
class VarScopeBegin(Expr):
    """Text from here on belongs to a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class VarScopeEnd(Expr):
    """The variable's text ends."""

    name: str


@dataclass(frozen=True, slots=True)
class ConcatenateAndAppend(Expr):
    """The texts of forked states, one after the other."""

    states: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"ConcatenateAndAppend({len(self.states)} states)"


@dataclass(frozen=True, slots=True)
class CommitLazy(Expr):
    """The backend computes and caches the text so far."""


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Expr):
    """Thinking of the model in `expr` moves to variables of its own."""

    model_type: str
    expr: Expr

    def names(self) -> tuple[str, ...]:
        """Variables whose thinking is separated.

        Raises:
            ValueError: one of them has no name.
        """
        found = [x.name for x in flatten(self.expr) if isinstance(x, Gen | Select)]
        if any(not name for name in found):
            raise ValueError("separate_reasoning needs gen and select calls with a name")
        return tuple(name for name in found if name)


def reasoning_name(name: str) -> str:
    """The variable that takes the thinking of variable `name`."""
    return f"{name}_reasoning_content"


def as_expr(value: object) -> Expr:
    """A string, node, or sequence of them as a node.

    Raises:
        ValueError: `value` is None, the result of a function that forgot to return.
        TypeError: anything else.
    """
    if isinstance(value, str):
        return ConstantText(value)
    if isinstance(value, Expr):
        return value
    if isinstance(value, list | tuple):
        return ExprList(tuple(as_expr(item) for item in value))
    if value is None:
        raise ValueError("Tried to append None to state.")
    raise TypeError(f"cannot append {type(value).__name__} to a state; use str() or gen()")


def concatenate(a: object, b: object) -> ExprList:
    """Two nodes, strings or lists as one list."""
    return ExprList((*_items(as_expr(a)), *_items(as_expr(b))))


def _items(expr: Expr) -> tuple[Expr, ...]:
    return expr.items if isinstance(expr, ExprList) else (expr,)


def flatten(expr: Expr) -> Iterator[Expr]:
    """The nodes of nested lists, in order."""
    if isinstance(expr, ExprList):
        for item in expr.items:
            yield from flatten(item)
    else:
        yield expr
