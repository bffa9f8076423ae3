"""Calls written as XML-like tags, with one element for each parameter."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sylvan.text.tools.events import Calls
from sylvan.text.tools.json_text import read_value
from sylvan.text.tools.reader import Malformed, Reader, Steps, past_space
from sylvan.text.tools.values import ArgumentsWriter

_LIMIT = 512
_ATTRIBUTE = re.compile(r"([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"']+))")
_BARE = re.compile(r"\s*=\s*[\"']?([^\"'\s]+)[\"']?\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class TagGrammar:
    """Calls like `<invoke name="f"><parameter name="k">v</parameter></invoke>`.

    Attributes:
        bare: Unused; calls have a marker.
        wrappers: Markers of a section of calls; they may be consecutive.
        open: Start of the tag that names the function.
        close: Tag that ends the call.
        param_open: Start of the tag that names a parameter.
        param_close: Tag that ends its value.
        head_end: Text that ends a tag with a name.
        closers: Markers that may follow a call.
        names: Attributes that contain a name (`<function=f>` needs none).
        kinds: Attribute with a value's type, and its words for JSON types.
        trims: Whether values lose one line break at either end.
        quotes: Markers around values in which tags do not count.
    """

    bare: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    open: str
    close: str
    param_open: str
    param_close: str
    head_end: str = ">"
    closers: tuple[str, ...] = ()
    names: tuple[str, ...] = ("name",)
    kinds: str | None = None
    trims: bool = False
    quotes: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to search in the text."""
        return (*self.wrappers, self.open)

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        while marker in self.wrappers:
            marker = yield from reader.expect((*self.wrappers, self.open))
        name, _ = yield from self._head(reader)
        calls.start(name)
        if (yield from reader.lookahead(("{",))):
            yield from read_value(reader, calls.arguments)
            yield from reader.swallow((self.close, *self.closers))
            return
        writer = ArgumentsWriter(reader, calls, name, trims=self.trims)
        end = ""
        while end != self.close:
            end = yield from reader.expect((self.param_open, self.close, *self.closers))
            if end in self.closers:
                break
            if end == self.param_open:
                key, types = yield from self._head(reader)
                ends = (self.param_close, self.close)
                if self.quotes and (yield from reader.accept(self.quotes[:1])):
                    yield from writer.read(key, self.quotes[1:], types)
                    end = yield from reader.expect(ends)
                else:
                    end = yield from writer.read(key, ends, types)
        writer.close()
        yield from reader.swallow((self.close, *self.closers))

    def _head(self, reader: Reader) -> Steps[tuple[str, frozenset[str] | None]]:
        """Read the rest of a tag: a name, and the JSON types if given."""
        head, _ = yield from reader.until((self.head_end,), limit=_LIMIT)
        if match := _BARE.match(head):
            return match[1], None
        found = {m[1]: m[2] or m[3] or m[4] or "" for m in _ATTRIBUTE.finditer(head)}
        name = next((found[key] for key in self.names if found.get(key)), None)
        if not name:
            raise Malformed
        return name, _types(found.get(self.kinds or ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGrammar:
    """Calls like `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`.

    Attributes:
        bare: Unused; calls have a marker.
        wrappers: Markers of a section of calls.
        open: Marker before the name.
        separators: Texts that may end the name, besides a line break, the first key and `close`.
        key: Tags around a key.
        value: Tags around a value.
        close: Marker that ends the call.
        closers: Markers that may follow a call.
    """

    bare: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    open: str = "<tool_call>"
    separators: tuple[str, ...] = ()
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    close: str = "</tool_call>"
    closers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to search in the text."""
        return (*self.wrappers, self.open)

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        if marker in self.wrappers:
            yield from reader.expect((self.open,))
        reader.run_of(past_space)
        yield from reader.peek()
        reader.run_of(past_space)
        ends = (*self.separators, "\n", self.key[0], self.close)
        name, end = yield from reader.until(ends, limit=_LIMIT)
        if end in (self.key[0], self.close):
            reader.pos -= len(end)
        name = name.strip()
        calls.start(name)
        writer = ArgumentsWriter(reader, calls, name)
        tag, key = "", ""
        while tag != self.close:
            if tag == self.key[0]:  # a key without a value is dropped
                key, _ = yield from reader.until(self.key[1:], limit=_LIMIT)
                key = key.strip()
            elif tag and key:
                yield from writer.read(key, self.value[1:])
                key = ""
            elif tag:  # a value without a key
                yield from reader.until(self.value[1:])
            tag = yield from reader.expect((self.key[0], self.value[0], self.close))
        writer.close()
        yield from reader.swallow(self.closers)


def _types(word: str | None) -> frozenset[str] | None:
    """JSON types of a type attribute; DeepSeek's only says whether the value is a string."""
    if word in ("true", "string", "str"):
        return frozenset({"string"})
    if word == "false" or not word:
        return None if not word else frozenset({*_JSON_TYPES, "string"})
    return frozenset({word}) if word in _JSON_TYPES else None


_JSON_TYPES = ("null", "boolean", "integer", "number", "object", "array")
