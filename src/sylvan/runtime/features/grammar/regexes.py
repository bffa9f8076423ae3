"""Checks regexes for a library that interprets some of them differently.

xgrammar reads unknown escapes as letters, and ignores anchors inside a regex. Only regexes with an
unambiguous meaning are passed on; the rest is rejected.
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
    """Return a regex that xgrammar reads as other libraries do: `.` excludes newline.

    Raises:
        NotSupportedError: It is ambiguous; the message names the position.
    """
    written: list[str] = []
    end = len(text) - text.endswith("$")
    if text.endswith("$") and (end - len(text[:end].rstrip("\\"))) % 2:
        end += 1  # the dollar sign is escaped
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
