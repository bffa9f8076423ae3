"""Events of tool parsers, and their collection."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sylvan.text.spans import SpanLog, TextSpan
from sylvan.text.tools.reader import Malformed, Reader


class TextDelta(msgspec.Struct, frozen=True):
    """Text outside of calls."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call of the function `name`; calls are numbered from 0."""

    index: int
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """A piece of a call's arguments; the pieces of a complete call join to a JSON object."""

    index: int
    fragment: str


Event = TextDelta | CallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A callable function.

    Attributes:
        name: Its name.
        parameters: JSON schema of its arguments.
        strict: Whether its arguments must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @classmethod
    def from_openai(cls, tools: Sequence[Mapping[str, Any]] | None) -> tuple[ToolSpec, ...]:
        """Read tool definitions in the OpenAI shape, with or without the outer `function`."""
        found: list[ToolSpec] = []
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                strict = function.get("strict") is True
                found.append(cls(function["name"], parameters if parameters else {}, strict))
        return tuple(found)


class Calls:
    """Collects events, and commits the text that they account for.

    Args:
        reader: Each call event commits its text up to the current position.
        tools: Functions that may be called; None allows any name.

    Attributes:
        stays_text: Whether the last attempted call is text, including its markers.
    """

    def __init__(self, reader: Reader, tools: Collection[ToolSpec] | None) -> None:
        self._reader = reader
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._events: list[Event] = []
        self._kind = "text"
        self._pieces: list[str] = []
        self._index = -1
        self._spans = SpanLog()
        self.stays_text = False

    @property
    def count(self) -> int:
        """Calls so far."""
        return self._index + 1

    def knows(self, name: str) -> bool:
        """Whether a call of `name` may be reported."""
        return bool(name) and (self._tools is None or name in self._tools)

    def parameters(self, name: str) -> Mapping[str, Any]:
        """JSON schema of a function's arguments; empty if unknown."""
        tool = (self._tools or {}).get(name)
        return tool.parameters if tool else {}

    def guess(self, keys: Collection[str]) -> str:
        """The function whose parameters match the keys best; "" if none has any of them."""
        best, most = "", 0
        tools = self._tools or {}
        if len(tools) == 1:
            return next(iter(tools))
        for name, tool in tools.items():
            properties = tool.parameters.get("properties")
            known = set(properties) if isinstance(properties, Mapping) else set[str]()
            fit = len(known & set(keys)) - len(set(keys) - known)
            best, most = (name, fit) if fit > most else (best, most)
        return best

    def start(self, name: str) -> None:
        """Report a call.

        Raises:
            Malformed: There is no such function.
        """
        if not self.knows(name):
            raise Malformed
        self._flush()
        self.stays_text = False
        self._index += 1
        self._events.append(CallStart(self._index, name))
        self._reader.commit()

    def arguments(self, fragment: str) -> None:
        """Report a piece of the current call's arguments."""
        self._add("arguments", fragment)
        self._reader.commit()

    def text(self, text: str) -> None:
        """Report the first uncommitted text."""
        self._spans.add(self._reader.num_committed, len(text))
        self._add("text", text)

    def give_back(self) -> None:
        """Report all text read but not committed as text."""
        start = self._reader.num_committed
        text = self._reader.take_uncommitted()
        self._spans.add(start, len(text))
        self._add("text", text)

    def spans(self) -> list[TextSpan]:
        """Positions in the output of the text reported since the last call."""
        return self._spans.take()

    def take(self) -> list[Event]:
        """Return the collected events, merging adjacent ones of a kind."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, kind: str, piece: str) -> None:
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(piece)

    def _flush(self) -> None:
        joined = "".join(self._pieces)
        self._pieces.clear()
        if joined:
            is_text = self._kind == "text"
            self._events.append(
                TextDelta(joined) if is_text else ArgumentsDelta(self._index, joined)
            )
