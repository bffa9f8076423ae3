"""Literals as models write them in calls: Python's, JSON's, and Gemma's with its own quotes."""

from __future__ import annotations

import re
from typing import Any

_MAX_DEPTH = 64
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_SPACE = re.compile(r"\s*")
_QUOTES = ('<|"|>', '"""', "'''", '"', "'")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|\n|.)", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}


def parse_literal(text: str) -> Any:
    """Value of a literal: strings, numbers, constants, lists, tuples (as lists) and dicts.

    Raises:
        ValueError: It is not a literal of these kinds.
    """
    parser = _Parser(text)
    value = parser.value(0)
    parser.space()
    if parser.pos != len(text):
        raise ValueError("text after the literal")
    return value


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.pos = 0

    def space(self) -> None:
        match = _SPACE.match(self._text, self.pos)
        self.pos = match.end() if match else self.pos

    def value(self, depth: int) -> Any:
        self.space()
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        if quote := self._accept(_QUOTES):
            return self._string(quote)
        if bracket := self._accept(tuple(_CLOSING)):
            return self._items(bracket, depth + 1)
        if match := _NUMBER.match(self._text, self.pos):
            self.pos = match.end()
            return _number(match[0].replace("_", ""))
        if (match := _WORD.match(self._text, self.pos)) and match[0].lower() in _WORDS:
            self.pos = match.end()
            return _WORDS[match[0].lower()]
        raise ValueError("not a literal")

    def _accept(self, options: tuple[str, ...]) -> str:
        self.space()
        found = next((o for o in options if self._text.startswith(o, self.pos)), "")
        self.pos += len(found)
        return found

    def _items(self, bracket: str, depth: int) -> Any:
        pairs: dict[str, Any] = {}
        items: list[Any] = []
        while not self._accept((_CLOSING[bracket],)):
            if bracket == "{":
                key = self._key(depth)
                if not self._accept((":",)):
                    raise ValueError("a key without a value")
                pairs[key] = self.value(depth)
            else:
                items.append(self.value(depth))
            self.space()
            if not self._accept((",",)) and not self._text.startswith(_CLOSING[bracket], self.pos):
                raise ValueError("not closed")
        return pairs if bracket == "{" else items

    def _key(self, depth: int) -> str:
        self.space()
        if not self._text.startswith(_QUOTES, self.pos) and (
            match := _WORD.match(self._text, self.pos)
        ):
            self.pos = match.end()
            return match[0]
        return str(self.value(depth))

    def _string(self, quote: str) -> str:
        if quote == _QUOTES[0]:
            end = self._text.find(quote, self.pos)
            if end < 0:
                raise ValueError("a string without an end")
            text, self.pos = self._text[self.pos : end], end + len(quote)
            return text
        end = self.pos
        while not self._text.startswith(quote, end):
            end += 2 if self._text[end : end + 1] == "\\" else 1
            if end >= len(self._text):
                raise ValueError("a string without an end")
        text, self.pos = self._text[self.pos : end], end + len(quote)
        return _ESCAPE.sub(_unescape, text)


def _unescape(match: re.Match[str]) -> str:
    body = match[1]
    if body[0] in "uUx":
        code = int(body[1:], 16) if len(body) > 1 else None
        return chr(code) if code is not None and code < 0x110000 else match[0]
    if body[0] in "01234567":
        return chr(int(body, 8))
    return _ESCAPES.get(body, body if body in "\\'\"/" else match[0])


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number out of range")
    return value
