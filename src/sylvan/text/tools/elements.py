"""Tool calls whose arguments are nested elements named after the parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sylvan.text.tools.events import Calls
from sylvan.text.tools.reader import Malformed, Reader, Steps
from sylvan.text.tools.references import resolved
from sylvan.text.tools.values import ArgumentsWriter, allowed_types, to_json

_LIMIT = 512
_MAX_DEPTH = 64
_INVOKE = "invoke"
_ITEM = "item"
_NAME = re.compile(_INVOKE + r"\s+name\s*=\s*[\"']?([^\"'\s]+)[\"']?\Z")
_STRING = frozenset({"string"})
_BRANCHES = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementGrammar:
    """Calls like `#<tool_call>#<invoke name="f">#<k>v#</k>#</invoke>#</tool_call>`, `#` the mark.

    An object argument contains an element per key, an array one `<item>` per value. Tags inside
    text count only after the mark.

    Attributes:
        bare: Unused; calls have a marker.
        mark: Prefix of each tag.
        section: Tag around calls.
    """

    bare: tuple[str, ...] = ()
    mark: str
    section: str = "tool_call"

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to search in the text."""
        return (self.mark,)

    def read(self, marker: str, reader: Reader, calls: Calls) -> Steps[None]:
        closes, tag = yield from _tag(reader)
        if tag == self.section and not closes:
            yield from reader.expect((self.mark,))
            closes, tag = yield from _tag(reader)
        match = _NAME.match(tag)
        if closes or not match:
            raise Malformed
        calls.start(match[1])
        yield from self._arguments(reader, calls, match[1])
        place = reader.pos
        if (yield from reader.accept((self.mark,))) and not (
            yield from reader.accept((f"</{self.section}>",))
        ):
            reader.pos = place

    def _arguments(self, reader: Reader, calls: Calls, name: str) -> Steps[None]:
        writer = ArgumentsWriter(reader, calls, name)
        schema = calls.parameters(name)
        values = _Values(reader, self.mark, schema)
        while True:
            yield from reader.expect((self.mark,))
            closes, key = yield from _tag(reader)
            if closes:
                break
            if writer.types(key) == _STRING:  # streamed as it arrives
                ends = tuple(f"{self.mark}{gap}</{key}>" for gap in ("", " ", "\n"))
                yield from writer.read(key, ends)
            else:
                value = yield from values.value(key, values.child(schema, key, 0), 0)
                writer.write(key, value)
        if key not in (_INVOKE, self.section):
            raise Malformed
        writer.close()


class _Values:
    """Reads values that cannot be streamed.

    Args:
        reader: Source of the text.
        mark: Prefix of each tag.
        root: Schema that resolves references.
    """

    def __init__(self, reader: Reader, mark: str, root: Mapping[str, Any]) -> None:
        self._reader = reader
        self._mark = mark
        self._root = root

    def value(self, key: str, schema: Mapping[str, Any], depth: int) -> Steps[str]:
        """JSON text of the value of the element `key`, up to its closing tag.

        Raises:
            Malformed: the text ends too early, tags do not match, or nest too deeply.
        """
        if depth > _MAX_DEPTH:
            raise Malformed
        text, _ = yield from self._reader.until((self._mark,))
        place = self._reader.pos
        closes, tag = yield from _tag(self._reader)
        types = self._types(schema)
        if not closes and not text.strip() and types != _STRING:
            return (yield from self._container(key, tag, schema, depth))
        while not (closes and tag == key):  # a mark inside text
            self._reader.pos = place
            more, _ = yield from self._reader.until((self._mark,))
            text, place = text + self._mark + more, self._reader.pos
            closes, tag = yield from _tag(self._reader)
        if not text.strip() and "string" not in types:
            return _empty(types)
        return to_json(text, types)

    def child(self, schema: Mapping[str, Any], key: str, index: int) -> Mapping[str, Any]:
        """Schema of an element inside a value; empty if unknown."""
        for option in self._options(schema, 0):
            places = [option.get("additionalProperties")]
            properties = option.get("properties")
            if isinstance(properties, Mapping):
                places.insert(0, properties.get(key))
            if key == _ITEM:
                given = option.get("prefixItems")
                prefix = given if isinstance(given, list) else []
                places.insert(0, prefix[index] if index < len(prefix) else option.get("items"))
            if found := next((p for p in places if isinstance(p, Mapping) and p), None):
                return found
        return {}

    def _container(self, key: str, tag: str, schema: Mapping[str, Any], depth: int) -> Steps[str]:
        """JSON text of the object or array whose first element `tag` was opened."""
        found: dict[str, list[str]] = {}
        closes, count = False, 0
        while not closes:
            child = self.child(schema, tag, count)
            value = yield from self.value(tag, child, depth + 1)
            found.setdefault(tag, []).append(value)
            count += 1
            yield from self._reader.expect((self._mark,))
            closes, tag = yield from _tag(self._reader)
        if tag != key:
            raise Malformed
        if found.keys() == {_ITEM} and not self._has_property(schema):
            return _array(found[_ITEM])
        pairs = (
            f"{json.dumps(name, ensure_ascii=False)}: {v[0] if len(v) == 1 else _array(v)}"
            for name, v in found.items()
        )
        return "{" + ", ".join(pairs) + "}"

    def _has_property(self, schema: Mapping[str, Any]) -> bool:
        """Whether `item` is the name of a property."""
        return any(
            isinstance(properties := option.get("properties"), Mapping) and _ITEM in properties
            for option in self._options(schema, 0)
        )

    def _types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        return allowed_types(resolved(schema, self._root))

    def _options(self, schema: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
        """The schema and its branches, references followed."""
        target = resolved(schema, self._root)
        if target is None or depth > _MAX_DEPTH:
            return
        yield target
        for name in _BRANCHES:
            branches = target.get(name)
            for branch in branches if isinstance(branches, list) else ():
                if isinstance(branch, Mapping):
                    yield from self._options(branch, depth + 1)


def _tag(reader: Reader) -> Steps[tuple[bool, str]]:
    """Read a tag: whether it closes, and its content."""
    begin = yield from reader.expect(("</", "<"))
    text, _ = yield from reader.until((">",), limit=_LIMIT)
    return begin == "</", text.strip()


def _array(values: list[str]) -> str:
    return f"[{', '.join(values)}]"


def _empty(types: frozenset[str]) -> str:
    """The value of an empty element that is not a string."""
    forms = {"null": "null", "array": "[]", "object": "{}"}
    return next((text for kind, text in forms.items() if kind in types), '""')
