"""Incremental detokenisation: exact at UTF-8 boundaries, and at stops that span tokens."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sylvan.text.stops import StopFinder


class DetokenizerVocabulary(Protocol):
    """The vocabulary interface of detokenisation; `Tokenizer` implements it."""

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens that `skip_special_tokens` hides."""
        ...

    @property
    def strips_first_space(self) -> bool:
        """Whether the first token of a text loses one leading space."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """Bytes that the token adds to a text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizerOptions:
    """Text options of one request.

    Attributes:
        skip_special_tokens: Hide special tokens.
        spaces_between_special_tokens: Accepted for compatibility; like in transformers, it changes
            nothing for tokenizers that know their bytes.
        stop: Strings that end the output.
        stop_regex: Regular expressions that end the output.
        no_stop_trim: Keep the stop at the end of the text.
    """

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """The result of one push.

    Attributes:
        text: New text; it is final.
        stop: The stop string or pattern that ended the output, else None.
        kept_tokens: Output tokens that count so far: all, or up to and including the one that
          completed the stop.
    """

    text: str
    stop: str | None
    kept_tokens: int


class IncrementalDetokenizer:
    """Detokenises one output.

    The result depends only on the tokens, not on how they are pushed: the joined deltas equal the
    text of all tokens at once, and the last `kept_tokens` is the same. A lost state can therefore
    be rebuilt by pushing all earlier tokens in one call.

    Text is held back while it may still become a stop, and bytes while they may still become a
    character. U+FFFD appears only where the model produced bytes that are not UTF-8.

    Args:
        vocabulary: Bytes of the tokens.
        options: Options of the request.
        prompt_tail_ids: Last tokens of the prompt. If one of them is visible, the output continues
          a text, and its leading space is kept.

    Raises:
        RequestError: a stop pattern is not supported.
    """

    def __init__(
        self,
        vocabulary: DetokenizerVocabulary,
        options: DetokenizerOptions | None = None,
        *,
        prompt_tail_ids: Sequence[int] = (),
    ) -> None:
        options = options or DetokenizerOptions()
        self._bytes_of = vocabulary.token_bytes
        self._skipped = frozenset(vocabulary.special_ids if options.skip_special_tokens else ())
        self._at_start = vocabulary.strips_first_space and all(
            token in self._skipped for token in prompt_tail_ids
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopFinder(options.stop, options.stop_regex)
        self._no_stop_trim = options.no_stop_trim
        self._kept = 0
        self._stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop was found; further tokens are ignored."""
        return self._stop is not None

    def push(self, ids: Iterable[int], *, final: bool = False) -> Delta:
        """Add tokens; with `final`, release all text held back."""
        parts: list[str] = []
        if self._stops:
            for token in ids:
                if self.stopped:
                    break
                self._kept += 1
                parts.append(self._let_go(self._decoder.decode(self._visible_bytes(token))))
        elif not self.stopped:
            data = bytearray()
            for token in ids:
                self._kept += 1
                data += self._visible_bytes(token)
            parts.append(self._decoder.decode(bytes(data)))
        if final and not self.stopped:
            parts.append(self._let_go(self._decoder.decode(b"", final=True)))
            if not self.stopped:
                parts.append(self._stops.held)
        return Delta("".join(parts), self._stop, self._kept)

    def _visible_bytes(self, token: int) -> bytes:
        if token in self._skipped:
            return b""
        data = self._bytes_of(token)
        if self._at_start and data:
            self._at_start = False
            return data.removeprefix(b" ")
        return data

    def _let_go(self, text: str) -> str:
        match = self._stops.push(text)
        if match is None:
            return self._stops.release()
        self._stop = match.pattern
        return self._stops.held[: match.end if self._no_stop_trim else match.start]
