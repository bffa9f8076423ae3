"""Calls written as a function name followed by JSON arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from sylvan.text.tools.events import Calls
from sylvan.text.tools.json_text import capture, read_value
from sylvan.text.tools.objects import ObjectGrammar, read_object, read_objects
from sylvan.text.tools.reader import Malformed, Reader, Steps

_HEAD_LIMIT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGrammar:
    """Markers around `NAME ... {arguments}`.

    Attributes:
        bare: Unused; calls have a marker.
        wrappers: Markers of a section of calls.
        opens: Markers of one call.
        head_ends: Markers that end the part with the name; `{` also ends it, but is not consumed.
        name: Pattern whose first group is the name; it includes the opening marker.
        fences: Text that may separate that part from the arguments.
        closers: Markers that may follow a call.
        listed: `ObjectGrammar` for a marker followed by a JSON list instead.
        whole: Whether the JSON is `{name, arguments}` rather than the arguments.
        numbered: Whether a number may replace the name; the arguments identify the function.
        drops_strays: Whether closers without a call, and sections without calls, are removed.
    """

    bare: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    opens: tuple[str, ...]
    head_ends: tuple[str, ...]
    name: re.Pattern[str]
    fences: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    listed: ObjectGrammar | None = None
    whole: bool = False
    numbered: bool = False
    drops_strays: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to search in the text."""
        return (*self.wrappers, *self.opens, *(self.closers if self.drops_strays else ()))

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        if self.drops_strays and (yield from self._is_stray(marker, reader)):
            if calls.stays_text:
                raise Malformed
            reader.commit()
            return
        if marker in self.wrappers:
            marker = yield from reader.expect(self.opens)
        if self.listed and (yield from reader.lookahead(("[", "{"))):
            yield from read_objects(reader, calls, self.listed)
            return
        head, end = yield from reader.until(self.head_ends, limit=_HEAD_LIMIT)
        if end == "{":
            reader.pos -= 1
        match = self.name.search(marker + head)
        if not match:
            raise Malformed
        yield from reader.accept(self.fences)
        if self.numbered and match[1].isdecimal() and not calls.knows(match[1]):
            yield from _guess(reader, calls)
        elif self.whole:
            yield from read_object(reader, calls, match[1])
        else:
            yield from self._arguments(match[1], reader, calls)
        yield from reader.swallow(self.closers)

    def _is_stray(self, marker: str, reader: Reader) -> Steps[bool]:
        if marker in self.closers:
            return True
        return marker in self.wrappers and bool((yield from reader.lookahead(self.closers)))

    def _arguments(self, name: str, reader: Reader, calls: Calls) -> Steps[None]:
        following = yield from reader.lookahead(("{", *self.closers))
        if not following:
            raise Malformed
        calls.start(name)
        if following == "{":
            yield from read_value(reader, calls.arguments)
        else:
            calls.arguments("{}")


def _guess(reader: Reader, calls: Calls) -> Steps[None]:
    """Read arguments, and report a call of the function that they match."""
    if (yield from reader.peek()) != "{":
        raise Malformed
    text = yield from capture(reader)
    calls.start(calls.guess(json.loads(text)))
    calls.arguments(text)
