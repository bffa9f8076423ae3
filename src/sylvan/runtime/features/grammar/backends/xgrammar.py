"""xgrammar: pushdown automata whose masks are mostly computed at compile time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.features.grammar.api import (
    CompiledGrammar,
    GrammarMatcher,
    accept_each,
    fill_each,
)
from sylvan.runtime.features.grammar.dialect import Dialect, supported_keywords
from sylvan.runtime.features.grammar.error_location import locate_error
from sylvan.runtime.features.grammar.regexes import plain_regex
from sylvan.runtime.features.grammar.rewrite import rewrite
from sylvan.runtime.features.grammar.schema import object_schema, pointer
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.runtime.features.grammar.structural import (
    Node,
    choices,
    leaves,
    tree_of,
    with_leaves,
    within,
)
from sylvan.runtime.features.grammar.vocabulary import Vocabulary, single_bytes

try:
    import xgrammar
except ImportError as error:
    raise ConfigError(
        f"grammar.backend xgrammar cannot be used ({error}); pip install 'sylvan[grammar]'"
    ) from error

MAX_REASON_CHARS = 1000
MAX_CHARS = 2000  # with a position
MAX_WHITESPACE = 32
MAX_FORCED_BYTES = 256
DIALECT = Dialect(
    backend="xgrammar",
    typed={
        "object": frozenset(
            [
                "additionalProperties",
                "maxProperties",
                "minProperties",
                "patternProperties",
                "properties",
                "propertyNames",
                "required",
            ]
        ),
        "array": frozenset({"items", "maxItems", "minItems", "prefixItems"}),
        "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
        "integer": frozenset(
            ["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"]
        ),
        "number": frozenset(["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"]),
    },
    inferred={
        "additionalProperties": "object",
        "properties": "object",
        "items": "array",
        "prefixItems": "array",
    },
    formats=frozenset(
        [
            "duration",
            "email",
            "ipv6",
            "json-pointer",
            "relative-json-pointer",
            "uri",
            "uri-reference",
            "uri-template",
            "uuid",
        ]
    ),
    # characters that JSON may escape are matched unescaped
    patterns=re.compile(
        r"""\^?(?:[^\\"^$(\[\x00-\x1f]|\((?:\?:|(?!\?))|\[\^?|"""
        r"""\\[dwDWs.\-/()\[\]{}^$|*+?])*\$?"""
    ),
    exclusive=(
        {"pattern", "format", "minLength"},
        {"pattern", "format", "maxLength"},
        {"properties", "patternProperties", "propertyNames"},
        {"additionalProperties", "patternProperties", "propertyNames"},
        *({"multipleOf", bound} for bound in ("minimum", "maximum")),
        *({"multipleOf", bound} for bound in ("exclusiveMinimum", "exclusiveMaximum")),
    ),
)
XML_DIALECT = replace(DIALECT, typed={**DIALECT.typed, "string": frozenset({"format", "pattern"})})
"""Non-JSON styles: unquoted strings have any length."""

# The library accepts any three or four bytes as a character. After these first bytes, not
# every second byte is valid (Unicode, table 3-7).
_SECOND_BYTES = {
    0xE0: tuple(range(0xA0, 0xC0)),
    0xED: tuple(range(0x80, 0xA0)),
    0xF0: tuple(range(0x90, 0xC0)),
    0xF4: tuple(range(0x80, 0x90)),
}

_NO_BYTE = 256  # bytes that no text starts with
_MAX_WORDS = 1024  # IDs of a mask to scan for a common first byte

_JSON_OPTIONS: Mapping[str, Any] = {"strict_mode": False, "max_whitespace_cnt": MAX_WHITESPACE}
_OF_EBNF = re.compile(r"^EBNF \w+ error at line \d+, column \d+: ")
_UNABLE = re.compile(r"(?i)\bunsupported\b|\bnot (?:yet )?(?:supported|implemented)\b")
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
_ERRORS = (RuntimeError, ValueError, TypeError)


class XGrammar:
    """See `GrammarLibrary`."""

    isolated = False
    grows_later = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._words = vocabulary, _Words(vocabulary)
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        # one thread, because compiling must not take the model's cores; our own cache keeps results
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            compiled = self._recipe(spec)()
        except _ERRORS as error:
            reason = _reason(spec, error)
            kind = NotSupportedError if _UNABLE.search(reason) else RequestError
            raise kind(locate_error(spec, reason, _probe)[:MAX_CHARS], param=spec.kind) from None
        tags = spec.kind in ("structural_tag", "ebnf", "choice")
        named = [i for name, i in self._vocabulary.special.items() if tags and name in spec.text]
        return _Compiled(compiled, spec, named, self._words)

    def load(self, data: bytes) -> CompiledGrammar:
        """Compile again, which is faster than reading the library's JSON."""
        try:
            spec = GrammarSpec(*msgspec.msgpack.decode(data, type=tuple[str, str]))
        except msgspec.MsgspecError as error:
            raise RequestError(f"the compiled grammar cannot be read: {error}") from None
        return self.compile(spec)

    def _recipe(self, spec: GrammarSpec) -> Callable[[], xgrammar.CompiledGrammar]:
        compiler = self._compiler
        match spec.kind:
            case "json_schema":
                schema = _checked(spec)
                return lambda: compiler.compile_json_schema(schema, **_JSON_OPTIONS)
            case "regex":
                regex = plain_regex(spec.text, "xgrammar")
                return lambda: compiler.compile_regex(regex)
            case "choice":
                quoted = [json.dumps(c, ensure_ascii=False) for c in choices(spec)]
                return lambda: compiler.compile_grammar("root ::= " + " | ".join(quoted))
            case "structural_tag":
                tree = with_leaves(tree_of(spec), lambda node, at: _fitted(spec, node, at))
                tag = json.dumps({"type": "structural_tag", "format": tree})
                return lambda: compiler.compile_structural_tag(tag)
            case _:
                return lambda: compiler.compile_grammar(spec.text)


def _checked(spec: GrammarSpec, dialect: Dialect = DIALECT) -> str:
    """Return the schema of a spec; reject what the library would ignore."""
    schema = rewrite(object_schema(spec), supported_keywords(dialect)).schema
    dialect.check(schema)
    return json.dumps(schema)


def _fitted(tags: GrammarSpec, node: Node, at: str) -> Node:
    """Prepare a node of a structural tag so that it follows the same rules as a grammar alone.

    The library compiles schemas inside tags with other options than standalone schemas, so they
    are inserted as the grammar compiled alone.
    """
    for key in ("any_order", "excludes"):
        if node.get(key):
            message = f"structural_tag: {pointer(at, key)} is not supported by grammar.backend"
            raise NotSupportedError(f"{message} xgrammar", param="structural_tag")
    place, leaf = next(leaves(node, at))
    try:
        if leaf.kind == "regex":
            return {**node, "pattern": plain_regex(leaf.text, "xgrammar")}
        if leaf.kind != "json_schema":
            return node
        if node.get("style", "json") != "json" or node["type"] != "json_schema":
            _checked(leaf, XML_DIALECT)
            return {**node, "max_whitespace_cnt": MAX_WHITESPACE}
        schema = _checked(leaf)
        grammar = str(xgrammar.Grammar.from_json_schema(schema, **_JSON_OPTIONS))
    except RequestError as error:
        message = within(tags, place, leaf.kind, str(error))
        raise type(error)(message, param="structural_tag") from None
    return {"type": "grammar", "grammar": grammar}


def _probe(spec: GrammarSpec) -> str:
    library = xgrammar.Grammar
    try:
        match spec.kind:
            case "json_schema":
                library.from_json_schema(spec.text, **_JSON_OPTIONS)
            case "regex":
                library.from_regex(spec.text)
            case _:
                library.from_ebnf(spec.text)
    except _ERRORS as error:
        return _reason(spec, error)
    return ""


def _reason(spec: GrammarSpec, error: Exception) -> str:
    reason = _PLACE.sub("", str(error))[:MAX_REASON_CHARS].strip()
    # the compiled form of a regex is not what the client wrote
    return reason if spec.kind == "ebnf" else _OF_EBNF.sub("", reason)


class _Words:
    """Masks over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        tokens = vocabulary.tokens
        textual = np.array([bool(t) and not _is_broken(t) for t in tokens], bool)
        textual[vocabulary.non_text_ids()] = False  # the library treats control tokens as text
        ends = np.isin(np.arange(len(tokens)), vocabulary.eos_ids)
        first_bytes = np.array([t[0] if t else _NO_BYTE for t in tokens], np.int32)
        first_bytes[vocabulary.non_text_ids()] = _NO_BYTE
        self._first_bytes = first_bytes
        self.singles = single_bytes(vocabulary)
        self.usable = self._packed(textual | ends)
        self.no_ends = self._packed(textual & ~ends)
        self.following = {  # IDs that may follow such a byte
            last: self._packed(np.isin(first_bytes, second))
            for last, second in _SECOND_BYTES.items()
        }

    def _packed(self, allowed: NDArray[np.bool_]) -> IntArray:
        bits = np.zeros(self.vocabulary.words * 32, np.uint8)
        bits[: len(allowed)] = allowed
        return np.packbits(bits, bitorder="little").view(np.int32)

    def only_byte(self, row: IntArray) -> int | None:
        """Return the byte with which all IDs of a mask start; None if they differ."""
        places = np.flatnonzero(row)
        if not 0 < len(places) <= _MAX_WORDS:
            return None
        bits = np.unpackbits(row[places].view(np.uint8), bitorder="little").reshape(-1, 32)
        at, bit = np.nonzero(bits)
        found = np.unique(self._first_bytes[places[at] * 32 + bit])
        return int(found[0]) if len(found) == 1 and found[0] != _NO_BYTE else None

    def with_ids(self, mask: IntArray, ids: list[int]) -> IntArray:
        """Return a mask that also allows these IDs."""
        if not ids:
            return mask
        extra = np.zeros(self.vocabulary.size, bool)
        extra[ids] = True
        return mask | self._packed(extra)


class _Compiled:
    """A compiled grammar, its source, and the control tokens that it names."""

    library = "xgrammar"

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        spec: GrammarSpec,
        named: list[int],
        words: _Words,
    ) -> None:
        self._compiled, self._spec = compiled, spec
        self.words = words
        self.usable = words.with_ids(words.usable, named)
        self.no_ends = words.with_ids(words.no_ends, named)

    def matcher(self) -> GrammarMatcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self)

    def dump(self) -> bytes:
        """Return the source: the library's JSON is a thousand times larger."""
        return msgspec.msgpack.encode((self._spec.kind, self._spec.text))


class _Matcher:
    """See `GrammarMatcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, compiled: _Compiled) -> None:
        self._matcher, self._compiled = matcher, compiled
        self._error = ""
        self._last_bytes = [0]  # accepted tokens
        self._row: IntArray = np.empty_like(compiled.usable)
        self._is_filled = False  # whether `_row` is the mask of the current state

    def fill_mask(self, row: IntArray) -> bool:
        row[:] = self._mask()
        return True

    def _mask(self) -> IntArray:
        """Return the mask of the current state; the next call overwrites it."""
        row, compiled = self._row, self._compiled
        if self._is_filled:
            return row
        if not self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0):
            row[:] = -1
        np.bitwise_and(row, compiled.usable, out=row)
        if self._last_bytes[-1] in _SECOND_BYTES:
            np.bitwise_and(row, compiled.words.following[self._last_bytes[-1]], out=row)
        self._is_filled = True
        return row

    def accept(self, token: int) -> bool:
        text = self._compiled.words.vocabulary.tokens[token]
        if text and not _may_follow(self._last_bytes[-1], text[0]):
            return False
        try:
            taken = self._matcher.accept_token(token)
        except _ERRORS as error:
            self._error = _PLACE.sub("", str(error))[:MAX_REASON_CHARS]
            return False
        if taken:
            self._last_bytes.append(text[-1] if text else 0)
            self._is_filled = False
        return taken

    @staticmethod
    def fill_masks(matchers: Sequence[_Matcher], bits: IntArray, rows: Sequence[int]) -> None:
        fill_each(matchers, bits, rows)

    def accept_all(self, tokens: Sequence[int]) -> int:
        return accept_each(self, tokens)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._last_bytes[-num_tokens:]
            self._is_filled = False

    def forced(self) -> bytes:
        """See `GrammarMatcher.forced`.

        Follows masks byte by byte. The library's `find_jump_forward_string` has no limit, and
        raises if the text ends inside a character.
        """
        words, data = self._compiled.words, bytearray()
        while words.singles and len(data) < MAX_FORCED_BYTES and not self.is_accepting():
            byte = words.only_byte(self._mask())
            if byte is None or not self.accept(words.singles[byte]):
                break
            data.append(byte)
        self.rollback(len(data))
        return bytes(data)

    def is_accepting(self) -> bool:
        return self._matcher.is_completed()

    def is_terminated(self) -> bool:
        if not self._matcher.is_completed():
            return False
        return not bool((self._mask() & self._compiled.no_ends).any())

    def error(self) -> str:
        return self._error


def _may_follow(last: int, byte: int) -> bool:
    return last not in _SECOND_BYTES or byte in _SECOND_BYTES[last]


def _is_broken(token: bytes) -> bool:
    return not all(map(_may_follow, token, token[1:]))


BACKEND = XGrammar
