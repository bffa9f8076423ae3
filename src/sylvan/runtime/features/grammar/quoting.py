r"""Character classes of patterns as llguidance holds them inside JSON strings.

Where a class has all control characters, the library (1.9) takes every escape of JSON for a part of
it, those of `"` and `\` too: `[^"]` would allow the character that it excludes. So U+0001 is taken
out of such classes, which nobody will miss.
"""

from __future__ import annotations

import re

_CONTROL = "\x01"
_CLASS = re.compile(r"\\.|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])", re.DOTALL)
_SET_NOTATION = re.compile(r"\[.*\[|&&|--|~~|\|\|", re.DOTALL)  # Python warns of it


def quotable(pattern: str) -> str:
    """A pattern that matches the same strings, but for those with U+0001 in them."""
    return _CLASS.sub(lambda found: _narrowed(found["set"]) or found[0], pattern)


def _narrowed(written: str | None) -> str | None:
    return f"[{written}&&[^\\x01]]" if written and _needs_it(written) else None


def _needs_it(written: str) -> bool:
    """Whether a class has U+0001, and not both characters that JSON escapes."""
    if _SET_NOTATION.search(written):
        return True
    try:
        members = re.compile(written)
    except re.error:  # what only other languages have
        return True
    has = [members.fullmatch(character) is not None for character in (_CONTROL, '"', "\\")]
    return has[0] and not (has[1] and has[2])
