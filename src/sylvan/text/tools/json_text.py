"""Incremental JSON: streams valid text, and detects the first error at once.

Repairs control characters inside strings and Python's constants, which some models write.
"""

from __future__ import annotations

import json
import re

from sylvan.text.tools.reader import Malformed, Reader, Sink, Steps, past_space

_MAX_DEPTH = 128
_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = '"\\/bfnrt'


def read_value(reader: Reader, sink: Sink) -> Steps[None]:
    """Read one JSON value, including surrounding white space.

    Raises:
        Malformed: it is not JSON. The sink has received a valid prefix.
    """
    stack: list[str] = []
    wants = "value"
    while wants != "done":
        before = reader.pos
        char = yield from reader.peek()
        reader.run_of(past_space)
        space = reader.pos - before
        reader.pos += 1
        if len(stack) > _MAX_DEPTH:
            raise Malformed
        inner = bool(stack)
        step = _step(wants, char, stack)
        if step is None:
            reader.pos -= 1
            raise Malformed
        gap = " " if space and inner and char not in ",:" else ""
        if step == "string":
            sink(gap + '"')
            yield from read_string(reader, sink)
            wants = "colon" if wants.startswith("key") else _after(stack)
        elif step == "scalar":
            reader.pos -= 1
            sink(gap + (yield from _scalar(reader)))
            wants = _after(stack)
        else:
            sink(gap + char)
            wants = step


def _step(wants: str, char: str, stack: list[str]) -> str | None:
    """The state after `char`, or None if it is not allowed."""
    if char in "}]":
        if wants not in ("comma", "key or end", "value or end") or stack[-1] != char:
            return None
        stack.pop()
        return _after(stack)
    if wants == "comma":
        return ("key" if stack[-1] == "}" else "value") if char == "," else None
    if wants == "colon":
        return "value" if char == ":" else None
    return _value_step(wants, char, stack)


def _value_step(wants: str, char: str, stack: list[str]) -> str | None:
    if char == '"':
        return "string"
    if wants.startswith("key") or char in ",:":
        return None
    if char in "{[":
        stack.append("}" if char == "{" else "]")
        return "key or end" if char == "{" else "value or end"
    return "scalar"


def _after(stack: list[str]) -> str:
    return "comma" if stack else "done"


def read_string(reader: Reader, sink: Sink) -> Steps[None]:
    """Read a JSON string whose opening quote was read; the closing one goes to the sink too.

    Raises:
        Malformed: It has a wrong escape, or does not end.
    """
    while True:
        if text := reader.run_of(_string_stop):
            sink(text)
        char = yield from reader.char()
        if char == '"':
            sink(char)
            return
        if char == "\\":
            reader.pos -= 1
            sink((yield from _escape(reader)))
        elif char < " ":
            sink(json.dumps(char)[1:-1])
        else:
            reader.pos -= 1


def decode_string(reader: Reader) -> Steps[str]:
    """Read a JSON string whose opening quote was read, and return its value."""
    parts: list[str] = []
    yield from read_string(reader, parts.append)
    return json.loads('"' + "".join(parts))


def capture(reader: Reader) -> Steps[str]:
    """Read one JSON value and return its text."""
    parts: list[str] = []
    yield from read_value(reader, parts.append)
    return "".join(parts)


def _string_stop(text: str, start: int) -> int:
    match = _STRING_STOP.search(text, start)
    return match.start() if match else len(text)


def _escape(reader: Reader) -> Steps[str]:
    start = reader.pos
    yield from reader.char()
    kind = yield from reader.char()
    if kind in _ESCAPES:
        return "\\" + kind
    digits = ""
    while kind == "u" and len(digits) < 4:
        digit = yield from reader.char()
        if digit not in "0123456789abcdefABCDEF":
            break
        digits += digit
    if len(digits) < 4:
        reader.pos = start
        raise Malformed
    return f"\\u{digits}"


def _scalar(reader: Reader) -> Steps[str]:
    start = reader.pos
    text = yield from reader.while_in(_is_scalar, 400)
    text = _PYTHON.get(text, text)
    if not _SCALAR.fullmatch(text):
        reader.pos = start
        raise Malformed
    return text


def _is_scalar(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char in "+-.")
