"""JSON as RFC 8259 means it: no NaN, no repeated names, no numbers that cannot be kept."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import orjson

from sylvan.protocol.errors import RequestError

MAX_DEPTH = 128
MAX_VALUES = 4_000_000
MAX_NAMES = 65_536
MAX_INT = 2**64 - 1
MIN_INT = -(2**63)

_LONG_NUMBER = re.compile(rb"\d{18}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_json(body: bytes) -> Any:
    """Decode a request body.

    Raises:
        RequestError: The text is not UTF-8, not JSON, or holds NaN, Infinity, a number beyond
            64 bits, a name twice in one object, half a surrogate pair, too many levels, values, or
            names in one object.
    """
    if body.count(b",") > MAX_VALUES:  # decoding holds up everybody else
        raise RequestError(f"The body has more than {MAX_VALUES} values.")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The body is not valid UTF-8: {error.reason} at byte {error.start}."
        ) from error
    try:
        value = _decoder(body).decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise RequestError(f"The body is not valid JSON: {error.msg} at {where}.") from error
    except RecursionError as error:
        raise RequestError(f"The body is nested deeper than {MAX_DEPTH} levels.") from error
    if _SURROGATE.search(body):
        _refuse_lone_surrogates(body)
    if max(body.count(b"["), body.count(b"{")) > MAX_DEPTH // 2:
        _check_depth(value)
    return value


def _decoder(body: bytes) -> json.JSONDecoder:
    parse_int = _bounded_int if _LONG_NUMBER.search(body) else None
    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=parse_int,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        raise RequestError(f"An object of the body has more than {MAX_NAMES} names.")
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RequestError(
                    f"The name {name[:64]!r} occurs twice in one object.", param=name[:64]
                )
            seen.add(name)
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is not a JSON number.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"The number {text[:32]} is too large; the limit is 1.8e308.")
    return value


def _bounded_int(text: str) -> int:
    if len(text) <= 20 and MIN_INT <= (value := int(text)) <= MAX_INT:
        return value
    raise RequestError(f"The integer {text[:32]} is beyond 64 bits.")


def _refuse_lone_surrogates(body: bytes) -> None:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        message = "A string of the body holds half of a surrogate pair."
        raise RequestError(message) from error


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [child for item in level for child in _containers(item)]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise RequestError(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _containers(item: Any) -> list[Any]:
    children = item.values() if isinstance(item, dict) else item
    return [child for child in children if isinstance(child, dict | list)]
