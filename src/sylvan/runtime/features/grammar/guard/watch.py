"""Parses the JSON of an output incrementally, and reports when a value violates the schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sylvan.runtime.features.grammar.guard.conditions import Conditions, SchemaPlace

_SPACE = b" \t\r\n"
_QUOTE, _ESCAPE, _COMMA, _COLON = b'"\\,:'
_OPEN_ARRAY, _CLOSE_ARRAY, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"


@dataclass(frozen=True, slots=True)
class Violation:
    """A closed value, or an open container, can never be part of a valid output.

    Attributes:
        reason: Reason; names the keyword.
        at: Byte of the text that caused it.
        starts: Starts of the values in it and of itself, then of those around it, latest first:
            regenerating from one of them may repair it, more likely so the earlier it is.
        name: Name of the schema.
    """

    reason: str
    at: int
    starts: tuple[int, ...]
    name: str = "json_schema"


@dataclass(slots=True, eq=False)
class _Container:
    """An array or an object that is still open.

    Attributes:
        value: Its items or members so far.
        start: Where it starts.
        parts: Where its items and keys start.
        key: Key of the next value.
    """

    value: list[Any] | dict[str, Any]
    place: SchemaPlace
    start: int
    parts: list[int] = field(default_factory=list[int])
    key: str | None = None


class JsonWatch:
    """The state of one output. The text must be a prefix of JSON, which the grammar ensures.

    Args:
        conditions: Conditions of its schema.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._open: list[_Container] = []
        self._scalar = bytearray()  # a number, a word or a string that is still open
        self._scalar_start = 0
        self.in_string = self._escaped = False
        self._checks = True
        self.length = 0  # bytes of text so far
        self.done = False  # whether the outermost value has closed

    @property
    def in_word(self) -> bool:
        """Whether the output so far is a single number or word."""
        return bool(self._scalar) and not self.in_string and not self._open

    @property
    def undecided_from(self) -> int | None:
        """Return the start of the outermost open value that may still violate the schema."""
        for container in self._open:
            if container.place.guarded:
                return container.start
        guarded = self._scalar and not self._is_key and self._place().guarded
        return self._scalar_start if guarded else None

    def write(self, text: bytes, *, check: bool = True) -> Violation | None:
        """Append `text`; return the first violation in it, after which nothing is parsed.

        Args:
            text: Bytes; may start and end inside characters.
            check: False: known to have no violations.
        """
        self._checks = check
        for byte in text:
            self.length += 1
            if (violation := self._byte(byte)) is not None:
                return violation
        return None

    def end(self) -> Violation | None:
        """End the output, which completes a trailing number."""
        self._checks = True
        return self._close_scalar() if self._scalar and not self.in_string else None

    # ---- bytes

    def _byte(self, byte: int) -> Violation | None:
        if self.in_string:
            return self._string(byte)
        if self._scalar:
            if byte not in b"]},:" and byte not in _SPACE:
                self._scalar.append(byte)
                return None
            if (violation := self._close_scalar()) is not None:
                return violation
        if byte == _QUOTE:
            self._begin_scalar(byte)
            self.in_string = True
        elif byte in (_OPEN_ARRAY, _OPEN_OBJECT):
            place, start = self._place(), self.length - 1
            self._note_start(start)
            self._open.append(_Container([] if byte == _OPEN_ARRAY else {}, place, start))
        elif byte in (_CLOSE_ARRAY, _CLOSE_OBJECT) and self._open:
            closed = self._open.pop()
            return self._close(closed.value, closed.place, closed.start, closed.parts)
        elif byte not in b",:" and byte not in _SPACE:
            self._begin_scalar(byte)
        return None

    def _string(self, byte: int) -> Violation | None:
        self._scalar.append(byte)
        if self._escaped:
            self._escaped = False
        elif byte == _ESCAPE:
            self._escaped = True
        elif byte == _QUOTE:
            self.in_string = False
            return self._close_scalar()
        return None

    def _begin_scalar(self, byte: int) -> None:
        self._scalar.append(byte)
        self._scalar_start = self.length - 1
        self._note_start(self._scalar_start)

    def _note_start(self, start: int) -> None:
        """Record the start of a part of the innermost container; a value belongs to its key."""
        if self._open and self._open[-1].key is None:
            self._open[-1].parts.append(start)

    # ---- values

    @property
    def _is_key(self) -> bool:
        within = self._open[-1] if self._open else None
        return within is not None and isinstance(within.value, dict) and within.key is None

    def _place(self) -> SchemaPlace:
        """Return the place of the current or next value."""
        if not self._open:
            return self._conditions.root
        within = self._open[-1]
        if isinstance(within.value, list):
            return self._conditions.item(within.place, len(within.value))
        return self._conditions.member(within.place, within.key or "")

    def _close_scalar(self) -> Violation | None:
        text = bytes(self._scalar).decode("utf-8", "replace")
        try:
            value = json.loads(text)
        except ValueError:  # not an answer: it may still become a thinking marker
            value = text
        start = self._scalar_start
        if self._is_key:
            self._scalar.clear()
            within = self._open[-1]
            within.key = str(value)
            assert isinstance(within.value, dict)
            return self._begun({**within.value, value: None})
        place = self._place()
        self._scalar.clear()
        inside = [start + 1, start + 1 + len(text) // 2] if isinstance(value, str) else []
        return self._close(value, place, start, inside)

    def _close(
        self, value: Any, place: SchemaPlace, start: int, parts: list[int]
    ) -> Violation | None:
        conditions = self._conditions
        reason = conditions.check(place, value) if self._checks else ""
        if not self._open:
            self.done = True
            reason = reason or (conditions.check_whole(value) if self._checks else "")
        if reason:
            return self._violation(reason, start, parts)
        if not self._open:
            return None
        within = self._open[-1]
        if isinstance(within.value, list):
            within.value.append(value)
        else:
            within.value[within.key or ""] = value
            within.key = None
        return self._begun(within.value)

    def _begun(self, value: Any) -> Violation | None:
        """Return the violation of the innermost container, whose value so far is `value`."""
        within = self._open[-1]
        reason = self._conditions.check_begun(within.place, value) if self._checks else ""
        if not reason:
            return None
        self._open.pop()
        return self._violation(reason, within.start, within.parts)

    def _violation(self, reason: str, start: int, parts: list[int]) -> Violation:
        starts = [*_some(parts), start]
        for container in reversed(self._open):
            starts += [*_some(container.parts), container.start]
        return Violation(reason, self.length - 1, tuple(dict.fromkeys(starts)))


def _some(parts: list[int]) -> list[int]:
    """Sample the starts of parts: the last ones, ever fewer before them, and the first."""
    found: list[int] = []
    step, at = 1, len(parts) - 1
    while at > 0:
        found.append(parts[at])
        at -= step
        step *= 2
    return [*found, *parts[:1]]
