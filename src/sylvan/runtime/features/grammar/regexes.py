"""Regexes for a library that reads some of them otherwise than everybody else.

xgrammar takes escapes that it does not know for letters and ignores anchors inside a regex. What is
certain to mean the same everywhere goes to it; the rest is refused.
"""

from __future__ import annotations

import re

from sylvan.runtime.features.grammar.spec import NotSupportedError

_ESCAPE = (
    r"\\(?:[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|[!-/:-@\[-`{-~])"
)
_MEMBER = rf"(?:{_ESCAPE}|(?!&&|--|~~)[^\\\[\]])"
_PLAIN = re.compile(
    rf"{_ESCAPE}|\[\^?{_MEMBER}+\]|\((?:\?:|\?<[A-Za-z]\w*>|(?!\?))|\)|\||"
    r"(?:[*+?]|\{\d+(?:,\d*)?\})\??|[^\\^$.\[\](){}|*+?]"
)
_ANY = "."
_NO_NEWLINE = r"[^\n]"


def plain_regex(text: str, backend: str) -> str:
    """A regex of which xgrammar reads every part as other libraries do: `.` is no newline.

    Raises:
        NotSupportedError: names the position.
    """
    written: list[str] = []
    end = len(text) - text.endswith("$")
    if text.endswith("$") and (end - len(text[:end].rstrip("\\"))) % 2:
        end += 1  # the dollar is escaped
    at = 1 if text.startswith("^") else 0
    while at < end:
        if text[at] == _ANY:
            written.append(_NO_NEWLINE)
            at += 1
            continue
        found = _PLAIN.match(text, at)
        if found is None or found.end() > end:
            message = f"regex: at position {at + 1}: {text[at : at + 2]!r} is not supported by"
            raise NotSupportedError(f"{message} grammar.backend {backend}", param="regex")
        written.append(found[0])
        at = found.end()
    return "".join(written)
