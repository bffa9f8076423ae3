"""llguidance: an Earley parser over a lazy lexer; compiles instantly, computes masks on demand."""

from __future__ import annotations

import bisect
import functools
import json
import os
import re
from collections.abc import Sequence

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import MAX_STATES, CompiledGrammar, GrammarMatcher
from sylvan.runtime.features.grammar.error_location import locate_error
from sylvan.runtime.features.grammar.notations import is_lark, with_plain_escapes
from sylvan.runtime.features.grammar.quoting import quotable
from sylvan.runtime.features.grammar.rewrite import SupportedKeywords, rewrite
from sylvan.runtime.features.grammar.schema import (
    Schema,
    counts_on_names,
    object_schema,
    pointer,
    walk,
    with_patterns,
)
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.runtime.features.grammar.structural import (
    LarkWriter,
    choices,
    escape_slashes,
    literal,
)
from sylvan.runtime.features.grammar.vocabulary import Vocabulary

MAX_REASON_CHARS = 1000
MAX_CHARS = 2000  # with a position
MAX_FORCED_BYTES = 1 << 16  # returned at once; finding more takes up to 0.3 s, by the limits below

# The library's own limits, besides the one on states (1 to 2 KiB each).
MAX_EXPRESSIONS = 1_000_000  # derivatives of all regexes of a grammar; 20 ms
MAX_STEP_EXPRESSIONS = 200_000  # derivatives for one mask; 14 ms
MAX_STEP_ITEMS = 50_000  # steps of the Earley parser for one mask; 2.5 ms
MAX_ROW_ITEMS = 2_000  # steps for one byte of text
MAX_SYMBOLS = 500_000  # symbols in the rules of a grammar

_ALONE = 2  # that many masks are done before other threads wake up
_FEW_CORES = 2  # while the threads of a step still hold the cores, waking others gains nothing
_MAX_KNOWN = 4096  # texts whose IDs are cached

_UNABLE = re.compile(r"Unimplemented keys|Unknown format|\bnot supported\b")
_OPTIONS_KEY = "x-guidance"  # key with which a schema passes options to the library
_CONTROL = b"\xff"  # starts a control token among forced bytes; never occurs in text

_JSON_OPTIONS: llguidance._lib.JsonCompileOptions = {
    "lenient": False,
    "whitespace_flexible": True,
    "coerce_one_of": False,  # do not reject a `oneOf` of schemas that may overlap
    # allow what printers write, including pretty-printing; some models never stop writing spaces
    "whitespace_pattern": r"\r?\n[\x20\x09]{0,32}|\x20{1,4}",
}


SUPPORTED = SupportedKeywords(
    frozenset(
        [
            "date",
            "date-time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "time",
            "uri",
            "uuid",
        ]
    )
)


class LLGuidance:
    """See `GrammarLibrary`."""

    isolated = False
    grows_later = True

    def __init__(self, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            _Tokens(vocabulary), n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids)
        )
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=max_states,
            initial_lexer_fuel=MAX_EXPRESSIONS,
            step_lexer_fuel=MAX_STEP_EXPRESSIONS,
            step_max_items=MAX_STEP_ITEMS,
            max_items_in_row=MAX_ROW_ITEMS,
            max_grammar_size=MAX_SYMBOLS,
            verbose_errors=False,
        )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        text = self._write(spec)
        first = self._first(text)
        if first.is_error():
            reason = _error_text(spec, text, _reason(first))
            kind = NotSupportedError if _UNABLE.search(reason) else RequestError
            raise kind(locate_error(spec, reason, self._probe)[:MAX_CHARS], param=spec.kind)
        return _Compiled(text, first)

    def load(self, data: bytes) -> CompiledGrammar:
        text = data.decode()
        first = self._first(text)
        if first.is_error():
            reason = _reason(first)[:MAX_REASON_CHARS]
            raise RequestError(f"the compiled grammar cannot be read: {reason}")
        compiled = _Compiled(text, first)
        compiled.prepare()
        return compiled

    def _first(self, text: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)

    def _probe(self, spec: GrammarSpec) -> str:
        if spec.kind == "json_schema":
            text = llguidance.LLMatcher.grammar_from_json_schema(spec.text, overrides=_JSON_OPTIONS)
        else:
            try:
                text = self._write(spec)
            except RequestError as error:
                return str(error).removeprefix(f"{spec.kind}: ")
        first = self._first(text)
        return _error_text(spec, text, _reason(first)) if first.is_error() else ""

    def _write(self, spec: GrammarSpec) -> str:
        match spec.kind:
            case "json_schema":
                text = json.dumps(_checked(spec))
                return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
            case "regex":
                return f"start: /{escape_slashes(spec.text)}/"
            case "choice":
                found = choices(spec)
                return "start: " + " | ".join(literal(c, self._vocabulary.special) for c in found)
            case "structural_tag":
                return LarkWriter(self._vocabulary.special, _lark, _inner).write(spec)
            case _:
                return _lark(spec.text)


class _Tokens(llguidance.TokenizerWrapper):
    """A vocabulary in the library's format."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = sorted({*vocabulary.special.values(), *vocabulary.eos_ids})
        self.is_tokenizer_wrapper = True
        self._encode = vocabulary.encode
        self._known: dict[str | bytes, list[int]] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        known = self._known.get(text)  # requested during mask computation, usually the same
        if known is not None:
            return known
        data = text.encode() if isinstance(text, str) else text
        ids = self._encode(data)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        # bytes without a token must not look like other tokens
        found = ids if b"".join(self.tokens[i] for i in ids) == data else []
        self._known[text] = found
        return found


class _Compiled:
    """A grammar as text, and a matcher at its start to copy."""

    library = "llguidance"

    def __init__(self, text: str, first: llguidance.LLMatcher) -> None:
        self._text, self._first = text, first
        self._spare: list[llguidance.LLMatcher] = []

    def prepare(self) -> None:
        """Create the first matcher now: creating one for a hard grammar takes milliseconds."""
        self._spare.append(self._first.deep_copy())

    def matcher(self) -> GrammarMatcher:
        try:
            return _Matcher(self._spare.pop())
        except IndexError:
            return _Matcher(self._first.deep_copy())

    def dump(self) -> bytes:
        """Return the text: the library has no serialisation."""
        return self._text.encode()


class _Matcher:
    """See `GrammarMatcher`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.library = matcher
        self.is_accepting = matcher.is_accepting  # needed for every mask

    def fill_mask(self, row: IntArray) -> bool:
        self.library.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return True

    @staticmethod
    def fill_masks(matchers: Sequence[_Matcher], bits: IntArray, rows: Sequence[int]) -> None:
        """Fill all masks in one native call, on all cores if there are many."""
        start, stride = bits.ctypes.data, bits.strides[0]
        if len(rows) > _ALONE and _cores() > _FEW_CORES:
            todo = [(m.library, row) for m, row in zip(matchers, rows, strict=True)]
            _threads().unsafe_compute_mask_ptr(todo, start, stride, len(bits))
            return
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.library.unsafe_compute_mask_ptr(start + row * stride, stride)

    def accept(self, token: int) -> bool:
        return self.library.try_consume_tokens([token]) == 1

    def accept_all(self, tokens: Sequence[int]) -> int:
        return self.library.try_consume_tokens(list(tokens))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.library.rollback(num_tokens)

    def forced(self) -> bytes:
        return self.library.compute_ff_bytes().partition(_CONTROL)[0][:MAX_FORCED_BYTES]

    def is_terminated(self) -> bool:
        return self.library.is_stopped() and not self.library.is_error()

    def error(self) -> str:
        return _reason(self.library)[:MAX_REASON_CHARS] if self.library.is_error() else ""


@functools.cache
def _cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


@functools.cache
def _threads() -> llguidance.LLExecutor:
    """The library's threads; they sleep between masks."""
    return llguidance.LLExecutor(min(_cores(), 32))


def _checked(spec: GrammarSpec) -> Schema:
    """Return the schema of a spec as the library enforces it; reject what it would ignore."""
    written = object_schema(spec)
    for at, node in walk(written):
        if node is not written and _OPTIONS_KEY in node:
            message = f"json_schema: {pointer(at, _OPTIONS_KEY)} is not supported"
            raise RequestError(message, param="json_schema")
    schema = rewrite(written, SUPPORTED).schema
    for at, node in walk(schema):
        if counts_on_names(node):
            message = f"json_schema: {at}/minProperties of names that are not given is not"
            message += " supported by grammar.backend llguidance"
            raise NotSupportedError(message, param="json_schema")
    return with_patterns(schema, quotable)


def _inner(spec: GrammarSpec) -> str:
    """Embed a schema in a Lark grammar, with its options."""
    return json.dumps({**_checked(spec), _OPTIONS_KEY: _JSON_OPTIONS})


def _reason(matcher: llguidance.LLMatcher) -> str:
    reason = matcher.get_error().replace("<non-verbose/>", "").strip()
    if "coerce_one_of" in reason:  # a library option that clients cannot set
        return "oneOf of schemas that may overlap is not supported"
    if "too many states" in reason:
        return f"{reason} (limit: grammar.max_states)"
    return "it matches no text at all" if reason.startswith("NoExtension") else reason


_OF_REGEX = re.compile(r"regex parse error:\n    .*\n    ( *)\^+\nerror: (.*)")
_EXCERPT = re.compile(r"\n +(?:\d+ \| .*|\^)")
_OF_LARK = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_MISSING = re.compile(r"Rule '([^']+)' not found")


def _error_text(spec: GrammarSpec, text: str, reason: str) -> str:
    """Map an error position to the client's text."""
    return _with_position(spec, text, reason)[:MAX_REASON_CHARS]


def _with_position(spec: GrammarSpec, text: str, reason: str) -> str:
    of_regex = _OF_REGEX.search(reason)
    if spec.kind == "regex" and of_regex:
        offset = len(of_regex[1])
        at = bisect.bisect_left(
            range(len(spec.text)), offset, key=lambda n: len(escape_slashes(spec.text[:n]))
        )
        return f"at position {at + 1}: {of_regex[2]}"
    if of_regex and spec.kind == "json_schema":
        return f"regex: at position {len(of_regex[1]) + 1}: {of_regex[2]}"
    plain = _EXCERPT.sub("", reason)
    of_lark = _OF_LARK.match(plain)
    if spec.kind != "ebnf" or not of_lark:
        return plain
    line, column, why = int(of_lark[1]), int(of_lark[2]), of_lark[3]
    if of_regex:
        why = f"regex: at position {len(of_regex[1]) + 1}: {of_regex[2]}"
    if text == spec.text:
        return f"at line {line}, column {column}: {why}"
    rule = text.split("\n")[line - 1].partition(":")[0].strip()  # in the Lark grammar
    pattern = re.compile(rf"(?im)^\s*{re.escape(rule).replace('_', '[-_]')}\s*::=")
    found = pattern.search(spec.text) if rule else None
    return f"at line {_line(spec.text, found.end())}: {why}" if found else why


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _lark(text: str) -> str:
    """Convert a grammar in EBNF (llama.cpp, xgrammar), or return one in Lark's notation."""
    if is_lark(text):
        return text
    try:
        return gbnf_to_lark(with_plain_escapes(text))
    except RecursionError:
        raise RequestError("ebnf is nested too deep", param="ebnf") from None
    except RequestError:
        raise
    except Exception as error:  # the converter raises plain Exception
        reason = str(error)
        missing = _MISSING.fullmatch(reason)
        used = missing and re.search(rf"(?<![\w-]){re.escape(missing[1])}(?![\w-])", text)
        if used:
            reason = f"at line {_line(text, used.start())}: {reason}"
        raise RequestError(f"ebnf: {reason}", param="ebnf") from None


BACKEND = LLGuidance
