"""Prevents user text from becoming control tokens.

Before rendering, each forged control token is replaced by a private-use character, so a template
can trim, split and search the rest of the content as usual. After rendering, the literal text is
restored. Partial control tokens at the ends of a string are replaced too, because a template may
join two strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sylvan.protocol.errors import RequestError

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_MARKS = re.compile(f"[{chr(_PRIVATE_USE[0])}-{chr(_PRIVATE_USE[-1])}]")


class ControlTokenEscaper:
    """Replaces the forged control tokens of one request, and restores them in the rendered text.

    Args:
        pattern: Finds whole control tokens.
        tokens: The control tokens.
        assistant_tokens: Control tokens allowed in assistant messages, because models write them.
    """

    def __init__(
        self,
        pattern: re.Pattern[str],
        tokens: Sequence[str],
        assistant_tokens: frozenset[str] = frozenset(),
    ) -> None:
        self._pattern = pattern
        self._assistant_tokens = assistant_tokens
        self._longest = max(map(len, tokens), default=0)
        heads, tails = _fragments(tokens, tails=True), _fragments(tokens, tails=False)
        self._heads = re.compile(_alternatives(heads))
        self._tails = re.compile(rf"({_alternatives(tails)})\Z")
        self._head_starts = frozenset(text[0] for text in heads)
        self._tail_ends = frozenset(text[-1] for text in tails)

    def begin(self, value: Any) -> Marks:
        """Start a request; `value` contains all of its strings."""
        return Marks(value)

    def message(self, message: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
        """A copy of a chat message without forgeries."""
        allowed = self._assistant_tokens if message.get("role") == "assistant" else frozenset()
        return {
            key: self.value(
                value, marks, allowed if key in ("content", "reasoning_content") else frozenset()
            )
            for key, value in message.items()
        }

    def value(self, value: Any, marks: Marks, allowed: frozenset[str] = frozenset()) -> Any:
        """A copy of any JSON value without forgeries, keys included."""
        if isinstance(value, str):
            return self.text(value, marks, allowed)
        if isinstance(value, Mapping):
            return {
                self.text(str(key), marks): self.value(item, marks, allowed)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item, marks, allowed) for item in value]
        return value

    def text(self, text: str, marks: Marks, allowed: frozenset[str] = frozenset()) -> str:
        """Replace each forged control token by a mark."""
        text = self._pattern.sub(
            lambda match: match[0] if match[0] in allowed else marks.of(match[0]), text
        )
        end = len(text.rstrip())
        while (
            text[end - 1 : end] in self._tail_ends  # which most texts do not pass
            and (found := self._tails.search(text, max(end - self._longest, 0), end))
        ):
            place = found.start(1)
            text = text[:place] + marks.of(text[place]) + text[place + 1 :]
        start = len(text) - len(text.lstrip())
        if text[start : start + 1] in self._head_starts and self._heads.match(text, start):
            text = text[:start] + marks.of(text[start]) + text[start + 1 :]
        return text


class Marks:
    """Marks of one request: a private-use character for each replaced text."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._free: Iterator[str] | None = None  # created on demand: most requests need no marks
        self._marks: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    def of(self, text: str) -> str:
        """Return the mark that replaces `text`.

        Raises:
            RequestError: The request itself uses every character that could be a mark.
        """
        if text not in self._marks:
            if self._free is None:
                self._free = _unused(self._request)
            mark = next(self._free, None)
            if mark is None:
                raise RequestError(
                    "messages use every character from U+F0000 to U+FFFFD; beside text that spells "
                    "a control token, at least one of these must be unused.",
                    param="messages",
                )
            self._marks[text] = mark
        return self._marks[text]

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Split rendered text into `(text, trusted)` segments, with the literal texts restored."""
        if not self._marks:
            return [(rendered, True)] if rendered else []
        literal = {mark: text for text, mark in self._marks.items()}
        # templates may print ASCII JSON, in which a mark is escaped
        literal |= {json.dumps(mark)[1:-1]: text for mark, text in literal.items()}
        pattern = re.compile("|".join(map(re.escape, literal)))
        segments: list[tuple[str, bool]] = []
        place = 0
        for match in pattern.finditer(rendered):
            segments.append((rendered[place : match.start()], True))
            segments.append((literal[match[0]], False))
            place = match.end()
        segments.append((rendered[place:], True))
        return [segment for segment in segments if segment[0]]


def _unused(request: Any) -> Iterator[str]:
    """Private-use characters that no string of the request contains."""
    used = {char for text in strings_in(request) for char in _MARKS.findall(text)}
    return (chr(code) for code in _PRIVATE_USE if chr(code) not in used)


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, dict | Mapping):  # the check for dict is faster
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)


def _fragments(tokens: Sequence[str], *, tails: bool) -> set[str]:
    """Proper prefixes of control tokens, or with `tails` proper suffixes."""
    cuts = ((token, cut) for token in tokens for cut in range(1, len(token)))
    found = {token[cut:] if tails else token[:cut] for token, cut in cuts}
    # fragments of word-like control tokens would match every text
    return {text for text in found if not text.isalnum()}


def _alternatives(texts: set[str]) -> str:
    """A regular expression for these texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"
