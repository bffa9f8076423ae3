"""xgrammar: pushdown automata whose masks are mostly computed while compiling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarMatcher
from sylvan.runtime.features.grammar.schema import refuse_keywords
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.structural import choices, tree_of
from sylvan.runtime.features.grammar.vocabulary import Vocabulary

try:
    import xgrammar
except ImportError as error:
    raise ConfigError(
        f"grammar.backend xgrammar cannot be used ({error}); pip install 'sylvan[grammar]'"
    ) from error

MAX_REASON_CHARS = 1000
MAX_WHITESPACE = 32
IGNORED_KEYWORDS = frozenset(
    {
        "allOf",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "not",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""The library compiles schemas with these, and does not enforce them."""

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
_ERRORS = (RuntimeError, ValueError, TypeError)


class XGrammar:
    """See `GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        # one thread: compiling must not take the cores from the model; what is kept is our cache's
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """See `GrammarBackend.compile`."""
        try:
            compiled = self._recipe(spec)()
        except _ERRORS as error:
            reason = _PLACE.sub("", str(error))[:MAX_REASON_CHARS].strip()
            raise RequestError(f"{spec.kind}: {reason}", param=spec.kind) from None
        tags = spec.kind in ("structural_tag", "ebnf", "choice")
        named = [i for name, i in self._vocabulary.special.items() if tags and name in spec.text]
        return _Compiled(compiled, named, self._vocabulary)

    def load(self, data: bytes) -> CompiledGrammar:
        """See `GrammarBackend.load`."""
        try:
            text, named = msgspec.msgpack.decode(data, type=tuple[str, list[int]])
            compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        except (*_ERRORS, msgspec.MsgspecError) as error:
            raise RequestError(f"the compiled grammar cannot be read: {error}") from None
        return _Compiled(compiled, named, self._vocabulary)

    def _recipe(self, spec: GrammarSpec) -> Callable[[], xgrammar.CompiledGrammar]:
        compiler = self._compiler
        match spec.kind:
            case "json_schema":
                refuse_keywords(spec.json(), IGNORED_KEYWORDS, "xgrammar")
                schema = json.dumps(spec.json())
                return lambda: compiler.compile_json_schema(
                    schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
            case "regex":
                return lambda: compiler.compile_regex(spec.text)
            case "choice":
                quoted = [json.dumps(c, ensure_ascii=False) for c in choices(spec)]
                return lambda: compiler.compile_grammar("root ::= " + " | ".join(quoted))
            case "structural_tag":
                tag = json.dumps({"type": "structural_tag", "format": tree_of(spec)})
                return lambda: compiler.compile_structural_tag(tag)
            case _:
                return lambda: compiler.compile_grammar(spec.text)


class _Compiled:
    """A compiled grammar, and the control tokens that it names."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, named: list[int], vocabulary: Vocabulary
    ) -> None:
        self._compiled, self._named = compiled, named
        bits = np.zeros(vocabulary.words * 32, np.uint8)
        bits[: vocabulary.size] = 1
        bits[vocabulary.untextual()] = 0
        ends = bits.copy()
        bits[[*named, *vocabulary.eos_ids]] = 1
        ends[list(vocabulary.eos_ids)] = 0
        # the library takes control tokens for text
        self.usable, self.not_ends = (
            np.packbits(b, bitorder="little").view(np.int32) for b in (bits, ends)
        )

    def matcher(self) -> GrammarMatcher:
        """See `CompiledGrammar.matcher`."""
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self)

    def dump(self) -> bytes:
        """See `CompiledGrammar.dump`."""
        return msgspec.msgpack.encode((self._compiled.serialize_json(), self._named))


class _Matcher:
    """See `GrammarMatcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, compiled: _Compiled) -> None:
        self._matcher, self._compiled = matcher, compiled
        self._error = ""

    def fill_mask(self, row: IntArray) -> bool:
        """See `GrammarMatcher.fill_mask`."""
        if not self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0):
            row[:] = -1
        np.bitwise_and(row, self._compiled.usable, out=row)
        return True

    def accept(self, token: int) -> bool:
        """See `GrammarMatcher.accept`."""
        try:
            return self._matcher.accept_token(token)
        except _ERRORS as error:
            self._error = _PLACE.sub("", str(error))[:MAX_REASON_CHARS]
            return False

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def forced(self) -> bytes:
        """See `GrammarMatcher.forced`."""
        return self._matcher.find_jump_forward_string().encode()

    def is_accepting(self) -> bool:
        """See `GrammarMatcher.is_accepting`."""
        return self._matcher.is_completed()

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        if not self._matcher.is_completed():
            return False
        row = np.empty_like(self._compiled.usable)
        self.fill_mask(row)
        return not bool((row & self._compiled.not_ends).any())

    def error(self) -> str:
        """See `GrammarMatcher.error`."""
        return self._error


BACKEND = XGrammar
