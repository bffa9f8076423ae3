"""Detects the notation of an EBNF grammar, and converts llama.cpp's escapes to Lark's."""

from __future__ import annotations

import re

from sylvan.protocol.errors import RequestError

_QUOTED = r'"(?:\\.|[^"\\\n])*"'
_GBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_LARK_RULE = re.compile(r"(?m)^[ \t]*(?:%\w+|[?!]{0,2}[a-zA-Z_]\w*(?:\.-?\d+)?[ \t]*:)")
_TERMINAL = re.compile(rf"{_QUOTED}|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SURROGATES = range(0xD800, 0xE000)
_MOST = 0x10FFFF


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's notation instead of llama.cpp's and xgrammar's."""
    return not _GBNF_RULE.search(text) and _LARK_RULE.search(text) is not None


def with_plain_escapes(text: str) -> str:
    r"""Convert llama.cpp's escapes `\u` and `\U`, which Lark does not have.

    Raises:
        RequestError: An escape is not a character; the message names the line.
    """

    def rewritten(terminal: re.Match[str]) -> str:
        if terminal[0].startswith("#"):
            return terminal[0]
        return _ESCAPE.sub(lambda found: _plain(found, text, terminal.start()), terminal[0])

    return _TERMINAL.sub(rewritten, text)


def _plain(escape: re.Match[str], text: str, offset: int) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    number = int(digits, 16)
    if number in _SURROGATES or number > _MOST:
        line = text.count("\n", 0, offset + escape.start()) + 1
        message = f"ebnf: at line {line}: {escape[0]} is not a character"
        raise RequestError(message, param="ebnf")
    return f"\\x{number:02x}" if number < 0x100 else chr(number)
