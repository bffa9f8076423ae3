r"""Rewrites character classes for llguidance's matching inside JSON strings.

If a class contains all control characters, the library (1.9) lets it match every JSON escape, also
of `"` and `\`: `[^"]` would allow the excluded character. So U+0001 is removed from such classes,
which has no consequence.
"""

from __future__ import annotations

import re

_CONTROL = "\x01"
_CLASS = re.compile(r"\\.|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])", re.DOTALL)
_SET_NOTATION = re.compile(r"\[.*\[|&&|--|~~|\|\|", re.DOTALL)  # Python warns about it


def quotable(pattern: str) -> str:
    """Return a pattern that matches the same strings, except those containing U+0001."""
    return _CLASS.sub(lambda found: _narrowed(found["set"]) or found[0], pattern)


def _narrowed(written: str | None) -> str | None:
    return f"[{written}&&[^\\x01]]" if written and _needs_it(written) else None


def _needs_it(written: str) -> bool:
    """Whether a class contains U+0001, and not both characters that JSON escapes."""
    if _SET_NOTATION.search(written):
        return True
    try:
        members = re.compile(written)
    except re.error:  # syntax of other languages
        return True
    has = [members.fullmatch(character) is not None for character in (_CONTROL, '"', "\\")]
    return has[0] and not (has[1] and has[2])
