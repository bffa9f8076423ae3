"""JSON inside structural tags: where it is, and a watch for outputs that contain it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.runtime.features.grammar.guard.conditions import Conditions
from sylvan.runtime.features.grammar.guard.watch import JsonWatch, Violation
from sylvan.runtime.features.grammar.schema import pointer
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.structural import tree_of, within

MAX_REGIONS = 512
MAX_BEGIN_BYTES = 256
"""Limits of the texts searched for after each byte of an output."""
_SPACE = b" \t\r\n"
_BEGINS_JSON = frozenset(b'{["-0123456789tfn')
_JSON_STARTS = frozenset(bytes((start,)) for start in _BEGINS_JSON)
_IN_WORDS = frozenset(b"+-.0123456789eEtrufalsn")


@dataclass(frozen=True, slots=True)
class JsonRegion:
    """JSON with a schema inside an output.

    Attributes:
        begin: Text after which it starts; empty: at the start of the output.
        place: Pointer to the schema in the tree of tags.
        schema: The schema.
    """

    begin: bytes
    place: str
    schema: Any


def regions(spec: GrammarSpec) -> list[JsonRegion]:
    """Return the schemas in structural tags whose start can be located in an output.

    Leaves out what follows free or optional text, and what starts like something else; if there
    are more than `MAX_REGIONS`, none are located.

    Raises:
        RequestError: The structural tags are malformed.
    """
    tree = tree_of(spec)
    found = list(_found(tree, "#/format", ""))
    texts = [region.begin for region in found]
    if len(found) > MAX_REGIONS or max(map(len, texts), default=0) > MAX_BEGIN_BYTES:
        return []

    def is_alone(region: JsonRegion) -> bool:
        if not region.begin:
            return texts.count(b"") == 1 and not _like_json(tree)
        others = [text for text in texts if text]
        return sum(text.startswith(region.begin) for text in others) == 1 and not any(
            region.begin.startswith(text) for text in others if text != region.begin
        )

    return [region for region in found if is_alone(region)]


def _found(node: Any, at: str, begin: str | None) -> Iterator[JsonRegion]:
    """Return the regions in a node; `begin`: the text before it, None if arbitrary."""
    if not isinstance(node, Mapping):
        return
    kind = node.get("type")
    if kind == "json_schema":
        if begin is not None:
            place = pointer(at, "json_schema")
            yield JsonRegion(begin.encode(), place, node.get("json_schema"))
    elif kind == "tag":
        own = node.get("begin")
        yield from _found(node.get("content"), pointer(at, "content"), _text(own))
    elif kind in ("triggered_tags", "tags_with_separator"):
        yield from _each(node, "tags", at, None)
    elif kind == "or":
        yield from _each(node, "elements", at, begin)
    elif kind == "sequence":
        yield from _in_sequence(node, at, begin)
    elif kind == "optional":
        yield from _found(node.get("content"), pointer(at, "content"), begin)
    elif kind in ("plus", "star", "repeat"):
        yield from _found(node.get("content"), pointer(at, "content"), None)


def _like_json(node: Any) -> bool:
    """Whether a node without a JSON schema may start like JSON."""
    kind = node.get("type") if isinstance(node, Mapping) else None
    if kind in ("const_string", "tag"):
        text = _text(node.get("value" if kind == "const_string" else "begin")) or "0"
        return text.lstrip().encode()[:1] in _JSON_STARTS
    if kind in ("triggered_tags", "tags_with_separator"):
        return not node.get("at_least_one") or any(map(_like_json, _listed(node, "tags")))
    if kind in ("or", "sequence"):
        parts = _listed(node, "elements")
        return any(map(_like_json, parts[:1] if kind == "sequence" else parts))
    return kind != "json_schema"


def _in_sequence(node: Mapping[str, Any], at: str, begin: str | None) -> Iterator[JsonRegion]:
    for number, part in enumerate(_listed(node, "elements")):
        yield from _found(part, pointer(at, "elements", number), begin)
        is_text = isinstance(part, Mapping) and part.get("type") == "const_string"
        begin = _text(part.get("value")) if is_text else None


def _each(node: Mapping[str, Any], key: str, at: str, begin: str | None) -> Iterator[JsonRegion]:
    for number, part in enumerate(_listed(node, key)):
        yield from _found(part, pointer(at, key, number), begin)


def _listed(node: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else ()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


@dataclass(frozen=True, slots=True)
class Guarded:
    """The schema of the JSON after a text.

    Attributes:
        begin: See `JsonRegion.begin`.
        conditions: None: the grammar enforces the schema.
        name: Name of the schema in messages.
    """

    begin: bytes
    conditions: Conditions | None
    name: str


def guarded_regions(spec: GrammarSpec, lost: Mapping[str, Sequence[str]]) -> Sequence[Guarded]:
    """Return all regions of structural tags; those in `lost` are guarded.

    Raises:
        RequestError: A schema is invalid.
    """
    found: list[Guarded] = []
    for region in regions(spec):
        keywords = lost.get(region.place)
        conditions = None if keywords is None else Conditions(region.schema, frozenset(keywords))
        name = within(spec, region.place, "json_schema", "json_schema")
        found.append(Guarded(region.begin, conditions, name))
    return found


class TagWatch:
    """Watches the JSON in an output of free text and tags; same interface as `JsonWatch`.

    Args:
        guarded: All possible regions.
    """

    def __init__(self, guarded: Sequence[Guarded]) -> None:
        self._begins = {region.begin: region for region in guarded if region.begin}
        self._longest = max(map(len, self._begins), default=0)
        self._lengths: dict[int, list[int]] = {}  # texts that precede JSON, by their last byte
        for text in self._begins:
            lengths = self._lengths.setdefault(text[-1], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        self._first = next((region for region in guarded if not region.begin), None)
        self._tail = b""  # the last text outside JSON, as long as a preceding text may be
        self._untouched = True  # only white space so far
        self._inner: JsonWatch | None = None
        self._region: Guarded | None = None  # that of `_inner`, or one that starts now
        self._offset = 0  # where the JSON of `_inner` started
        self.length = 0  # bytes of text so far

    @property
    def in_string(self) -> bool:
        """Whether any change of the next bytes changes the meaning of the output."""
        return self._inner is None or self._inner.in_string

    @property
    def undecided_from(self) -> int | None:
        within_json = self._inner.undecided_from if self._inner is not None else None
        return None if within_json is None else within_json + self._offset

    def write(self, text: bytes, *, check: bool = True) -> Violation | None:
        for value in text:
            self.length += 1
            if (violation := self._byte(value, check=check)) is not None:
                return violation
        return None

    def end(self) -> Violation | None:
        return self._located(self._inner.end()) if self._inner is not None else None

    def _byte(self, value: int, *, check: bool) -> Violation | None:
        inner = self._inner
        if inner is not None:
            if inner.in_word and value not in _IN_WORDS:  # inside a tag, nothing ends a number
                self._inner = None
                if check and (violation := self._located(inner.end())) is not None:
                    return violation
                self._region = None
            else:
                violation = self._located(inner.write(bytes((value,)), check=check))
                if inner.done:
                    self._inner = self._region = None
                return violation
        elif self._may_begin(value):
            return self._begin(value, check=check)
        self._outside(value)
        return None

    def _may_begin(self, value: int) -> bool:
        expected = self._region or (self._first if self._untouched else None)
        return expected is not None and value in _BEGINS_JSON

    def _begin(self, value: int, *, check: bool) -> Violation | None:
        region = self._region or self._first
        assert region is not None, "asked for before"
        self._region, self._tail, self._untouched = region, b"", False
        self._inner = JsonWatch(region.conditions or _ANYTHING)
        self._offset = self.length - 1
        return self._located(self._inner.write(bytes((value,)), check=check))

    def _outside(self, value: int) -> None:
        self._tail = (self._tail + bytes((value,)))[-self._longest :] if self._longest else b""
        ends = (self._tail[-length:] for length in self._lengths.get(value, ()))
        match = next((self._begins[text] for text in ends if text in self._begins), None)
        if match is not None:
            self._region = match
        elif value not in _SPACE:
            self._region = None  # no JSON follows: the text was quoted
            self._untouched = False

    def _located(self, violation: Violation | None) -> Violation | None:
        if violation is None or self._region is None:
            return violation
        starts = tuple(at + self._offset for at in violation.starts)
        return Violation(violation.reason, violation.at + self._offset, starts, self._region.name)


_ANYTHING = Conditions({}, frozenset())
