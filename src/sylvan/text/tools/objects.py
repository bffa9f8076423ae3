"""Calls written as JSON objects with a name and arguments, alone, listed, or between markers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sylvan.text.tools.events import Calls
from sylvan.text.tools.json_text import capture, decode_string, read_value
from sylvan.text.tools.reader import Malformed, Reader, Steps, past_space

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectGrammar:
    """Markers around JSON calls.

    Attributes:
        opens: Markers that start calls.
        inner: Markers that may follow the first one.
        closers: Markers that may follow calls.
        separators: Text that may separate two objects.
        bare: Forms of calls at the start of the output, without a marker.
        keyed: Whether objects look like `{"NAME": {arguments}}`.
        hides: Start and end of text that contains no calls.
        silent: Markers that are removed, together with adjacent white space.
    """

    opens: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    separators: tuple[str, ...] = (",", ";")
    bare: tuple[str, ...] = ()
    keyed: bool = False
    hides: tuple[str, str] | None = None
    silent: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to search in the text."""
        return (*self.opens, *(self.hides[:1] if self.hides else ()), *self.silent)

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        """Read the calls after a marker ("" at the start of the output).

        Raises:
            Malformed: They are not calls.
        """
        if self.hides and marker == self.hides[0]:
            calls.give_back()
            sink = _text_sink(reader, calls)
            yield from reader.until(self.hides[1:], sink=sink)
            calls.give_back()
            return
        if marker in self.silent:
            yield from reader.lookahead(self.markers)
            reader.run_of(past_space)
            reader.commit()
            return
        yield from reader.accept(self.inner)
        yield from read_objects(reader, calls, self)
        yield from reader.swallow(self.closers)


def read_objects(reader: Reader, calls: Calls, grammar: ObjectGrammar) -> Steps[None]:
    """Read one or more objects, optionally in a list.

    Raises:
        Malformed: there is none.
    """
    listed = yield from reader.accept(("[",))
    while True:
        yield from (_read_keyed if grammar.keyed else read_object)(reader, calls)
        place = reader.pos
        yield from reader.accept(grammar.separators)
        if not (yield from reader.lookahead(("{",))):
            reader.pos = place
            break
    if listed:
        yield from reader.accept(("]",))


class _Object:
    """State of a call object while it is read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.early_arguments: str | None = None
        self.is_started = False


def read_object(reader: Reader, calls: Calls, name: str | None = None) -> Steps[None]:
    """Read a call; a call of an unknown function is returned as text.

    Raises:
        Malformed: It is not an object, or has no name.
    """
    call = _Object()
    yield from _read_fields(reader, calls, call)
    call.name = call.name or name
    if call.name is None:
        raise Malformed
    if not calls.knows(call.name):
        calls.give_back()
    elif not call.is_started:
        calls.start(call.name)
        calls.arguments(call.early_arguments or "{}")
    else:
        reader.commit()


def _read_fields(
    reader: Reader, calls: Calls, call: _Object, *, inner: bool = False
) -> Steps[None]:
    yield from reader.expect(("{",))
    while (token := (yield from reader.expect(('"', ",", "}")))) != "}":
        if token == ",":
            continue
        key = yield from decode_string(reader)
        yield from reader.expect((":",))
        kind = yield from reader.peek()
        if key in _NAME_KEYS and kind == '"':
            yield from reader.expect(('"',))
            call.name = yield from decode_string(reader)
        elif key in _ARGUMENT_KEYS:
            yield from _read_arguments(reader, calls, call, kind)
        elif key == "function" and kind == "{" and not inner:
            yield from _read_fields(reader, calls, call, inner=True)
        else:
            yield from capture(reader)


def _read_arguments(reader: Reader, calls: Calls, call: _Object, kind: str) -> Steps[None]:
    if kind == "{" and call.name and calls.knows(call.name) and not call.is_started:
        calls.start(call.name)
        call.is_started = True
        yield from read_value(reader, calls.arguments)
        return
    text = yield from capture(reader)
    value: Any = json.loads(text) if kind in '"n' else None
    if isinstance(value, str):  # some models encode the arguments twice
        text, kind = value, "{" if _is_object(value) else ""
    elif kind == "n":
        text, kind = "{}", "{"
    if kind != "{":
        raise Malformed
    call.early_arguments = text


def _read_keyed(reader: Reader, calls: Calls) -> Steps[None]:
    yield from reader.expect(("{",))
    while (yield from reader.expect(('"',))):
        name = yield from decode_string(reader)
        yield from reader.expect((":",))
        if (yield from reader.peek()) != "{":
            raise Malformed
        calls.start(name)
        yield from read_value(reader, calls.arguments)
        if (yield from reader.lookahead((",", "}"))) == "}":
            yield from reader.expect(("}",))
            reader.commit()
            return
        yield from reader.expect((",",))


def _is_object(text: str) -> bool:
    try:
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _text_sink(reader: Reader, calls: Calls) -> Any:
    def sink(text: str) -> None:
        calls.text(text)
        reader.commit()

    return sink
