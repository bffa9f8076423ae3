"""outlines-core: one finite automaton over the whole vocabulary. Regular languages only."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

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
from sylvan.runtime.features.grammar.rewrite import rewrite
from sylvan.runtime.features.grammar.schema import object_schema
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.runtime.features.grammar.structural import choices
from sylvan.runtime.features.grammar.vocabulary import Vocabulary, single_bytes

try:
    import outlines_core
except ImportError as error:
    raise ConfigError(
        f"grammar.backend outlines_core cannot be used ({error}); pip install 'sylvan[grammar]'"
    ) from error

MAX_REASON_CHARS = 1000
MAX_CHARS = 2000  # with a position
MAX_ROLLBACK = 1 << 16
MAX_FORCED_BYTES = 256
DIALECT = Dialect(
    backend="outlines_core",
    typed={
        "object": frozenset({"additionalProperties", "minProperties", "properties", "required"}),
        "array": frozenset({"items", "maxItems", "minItems", "prefixItems"}),
        "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
    },
    inferred={"properties": "object", "prefixItems": "array"},
    formats=frozenset({"email", "uri", "uuid"}),
    # patterns become part of one regex of the whole text: `.` would match the quotes around it
    patterns=re.compile(
        r"""\^?(?:[A-Za-z0-9 _:@,=%~/<>!&;|{}+*?)-]|\((?:\?:|(?!\?))|\[[A-Za-z0-9 _-]+\]|"""
        r"""\\[.\-/()\[\]{}|*+?])*\$?"""
    ),
    exclusive=(
        {"items", "prefixItems"},
        {"pattern", "format", "minLength"},
        {"pattern", "format", "maxLength"},
        {"prefixItems", "minItems"},
        {"prefixItems", "maxItems"},
        {"properties", "minProperties"},
    ),
    overriding={"properties": "object", "prefixItems": "array"},
)


_NO_REGEX = "Failed to build DFA"
_ERRORS = (ValueError, TypeError, RuntimeError)


class OutlinesCore:
    """See `GrammarLibrary`."""

    isolated = False
    grows_later = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._textual = _Textual(vocabulary)
        ids: defaultdict[bytes, list[int]] = defaultdict(list)
        for i in np.setdiff1d(np.arange(vocabulary.size), vocabulary.non_text_ids()).tolist():
            if i not in vocabulary.eos_ids:
                ids[vocabulary.tokens[i]].append(i)
        self._words = outlines_core.Vocabulary(vocabulary.eos_ids[0], dict(ids))

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            index = outlines_core.Index(_regex(spec), self._words)
        except _ERRORS as error:
            message = locate_error(spec, _reason(spec, error), _probe)
            raise RequestError(message[:MAX_CHARS], param=spec.kind) from None
        return _Compiled(index, self._textual)

    def load(self, data: bytes) -> CompiledGrammar:
        try:
            index = outlines_core.Index.from_binary(data)
        except _ERRORS as error:
            raise RequestError(f"the compiled grammar cannot be read: {error}") from None
        return _Compiled(index, self._textual)


class _Textual:
    """The vocabulary as matchers use it: which byte each single-byte ID is."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.singles = {i: byte for byte, i in single_bytes(vocabulary).items()}


class _Compiled:
    library = "outlines_core"

    def __init__(self, index: outlines_core.Index, textual: _Textual) -> None:
        self.index, self.textual = index, textual

    def matcher(self) -> GrammarMatcher:
        return _Matcher(self)

    def dump(self) -> bytes:
        return self.index.__reduce__()[1][0]


class _Matcher:
    """See `GrammarMatcher`."""

    def __init__(self, compiled: _Compiled) -> None:
        self._index, self._textual = compiled.index, compiled.textual
        self._guide = outlines_core.Guide(compiled.index, MAX_ROLLBACK)

    def fill_mask(self, row: IntArray) -> bool:
        self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
        return True

    def accept(self, token: int) -> bool:
        if token in self._textual.vocabulary.eos_ids or not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, False)
        return True

    @staticmethod
    def fill_masks(matchers: Sequence[_Matcher], bits: IntArray, rows: Sequence[int]) -> None:
        fill_each(matchers, bits, rows)

    def accept_all(self, tokens: Sequence[int]) -> int:
        return accept_each(self, tokens)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._guide.rollback_state(num_tokens)

    def forced(self) -> bytes:
        """Return bytes while only one single byte is possible."""
        state, data = self._guide.get_state(), bytearray()
        singles = self._textual.singles
        while singles and len(data) < MAX_FORCED_BYTES and not self._index.is_final_state(state):
            allowed = self._index.get_allowed_tokens(state) or []
            if len(allowed) > 64:
                break
            found = {singles[i]: i for i in allowed if i in singles}
            if len(found) != 1:
                break
            byte, token = next(iter(found.items()))
            data.append(byte)
            state = self._index.get_next_state(state, token)
            if state is None:
                break
        return bytes(data)

    def is_accepting(self) -> bool:
        return self._index.is_final_state(self._guide.get_state())

    def is_terminated(self) -> bool:
        ends = self._textual.vocabulary.eos_ids
        return self.is_accepting() and all(i in ends for i in self._guide.get_tokens())

    def error(self) -> str:
        return ""


def _probe(spec: GrammarSpec) -> str:
    """Check that a pattern is valid as part of one regex."""
    try:
        regex = outlines_core.json_schema.build_regex_from_schema(spec.text)
    except _ERRORS as error:
        return _reason(spec, error)
    return _NO_REGEX if _wrong_regex(regex) else ""


def _reason(spec: GrammarSpec, error: Exception) -> str:
    reason = str(error)[:MAX_REASON_CHARS].strip()
    if _NO_REGEX not in reason:
        return reason
    wrong = _wrong_regex(spec.text) if spec.kind == "regex" else ""
    return wrong or _NO_REGEX


def _wrong_regex(regex: str) -> str:
    """Return Python's error for a regex, since the library does not report one; empty if valid."""
    try:
        re.compile(regex)
    except re.error as error:
        at = "" if error.pos is None else f"at position {error.pos + 1}: "
        return at + error.msg
    return ""


def _regex(spec: GrammarSpec) -> str:
    match spec.kind:
        case "json_schema":
            schema = rewrite(object_schema(spec), supported_keywords(DIALECT)).schema
            DIALECT.check(schema)
            return outlines_core.json_schema.build_regex_from_schema(json.dumps(schema))
        case "regex":
            return spec.text
        case "choice":
            return "(" + "|".join(map(re.escape, choices(spec))) + ")"
        case kind:
            message = f"{kind} is not supported by grammar.backend outlines_core"
            raise NotSupportedError(message, param=kind)


BACKEND = OutlinesCore
