"""Calls written as Python: `[f(a=1), g(b="x")]`, and in Gemma's notation `call:f{a:1}`."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.text.tools.events import Calls
from sylvan.text.tools.literals import parse_literal
from sylvan.text.tools.objects import ObjectGrammar, read_objects
from sylvan.text.tools.reader import Malformed, Reader, Steps, past_space
from sylvan.text.tools.values import ArgumentsWriter, dump

_NAME_LIMIT = 128
_OPENING = "([{"
_CLOSING = ")]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicGrammar:
    """A list of Python calls.

    Attributes:
        bare: Unused; calls have a marker.
        wrappers: Markers before the list.
        closers: Markers that may follow it.
        is_bare: Whether the list needs no marker.
        objects: Grammar for a list of JSON objects instead.
    """

    bare: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    is_bare: bool = True
    objects: ObjectGrammar | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to search in the text."""
        return (*self.wrappers, "[") if self.is_bare else self.wrappers

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        if marker in self.wrappers:
            if self.objects and (yield from self._has_objects(reader)):
                yield from read_objects(reader, calls, self.objects)
                yield from reader.swallow(self.closers)
                return
            yield from reader.expect(("[",))
        yield from self._call(reader, calls, is_first=True)
        while (yield from reader.expect((",", "]"))) == ",":
            yield from self._call(reader, calls, is_first=False)
        reader.commit()
        yield from reader.swallow(self.closers)

    def _has_objects(self, reader: Reader) -> Steps[bool]:
        place = reader.pos
        yield from reader.accept(("[",))
        found = yield from reader.lookahead(("{",))
        reader.pos = place
        return bool(found)

    def _call(self, reader: Reader, calls: Calls, *, is_first: bool) -> Steps[None]:
        name = yield from _name(reader)
        yield from reader.expect(("(",))
        known = calls.knows(name)
        if known:
            calls.start(name)
        elif is_first:
            raise Malformed
        writer = ArgumentsWriter(reader, calls, name)
        while not (yield from reader.accept((")",))):
            key = yield from _name(reader)
            yield from reader.expect(("=",))
            value = _literal((yield from _expression(reader)))
            if known:
                writer.write(key, value)
            yield from reader.accept((",",))
        if known:
            writer.close()
        else:
            calls.give_back()


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaGrammar:
    """Calls like `<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>`."""

    bare: tuple[str, ...] = ()
    open: str = "<|tool_call>"
    close: str = "<tool_call|>"

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to search in the text."""
        return (self.open,)

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        yield from reader.expect(("call:",))
        name, _ = yield from reader.until(("{",), limit=_NAME_LIMIT)
        if not calls.knows(name.strip()):
            raise Malformed
        body, _ = yield from reader.until((self.close,))
        arguments = _literal("{" + body)
        calls.start(name.strip())
        calls.arguments(arguments)
        yield from reader.swallow((self.close,))


def _name(reader: Reader) -> Steps[str]:
    yield from reader.peek()
    reader.run_of(past_space)
    name = yield from reader.while_in(_is_name, _NAME_LIMIT)
    if not name or name[0].isdigit():
        raise Malformed
    return name


def _is_name(char: str) -> bool:
    return char.isalnum() or char in "_.-"


def _expression(reader: Reader) -> Steps[str]:
    """Read up to, but not including, the comma or bracket that ends an argument."""
    text: list[str] = []
    depth = 0
    while True:
        char = yield from reader.char()
        if depth == 0 and char in ",)":
            reader.pos -= 1
            return "".join(text)
        depth += (char in _OPENING) - (char in _CLOSING)
        text.append(char)
        if char in "\"'":
            yield from _rest_of_string(reader, char, text)


def _rest_of_string(reader: Reader, quote: str, text: list[str]) -> Steps[None]:
    char = ""
    while char != quote:
        char = yield from reader.char()
        text.append(char)
        if char == "\\":
            text.append((yield from reader.char()))


def _literal(text: str) -> str:
    try:
        return dump(parse_literal(text.strip()))
    except ValueError as error:
        raise Malformed from error
