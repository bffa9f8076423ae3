"""Strict JSON (RFC 8259): no NaN, no duplicate names, no numbers that would lose digits."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import orjson

from sylvan.protocol.errors import RequestError

MAX_INT = 2**64 - 1
MIN_INT = -(2**63)

_SHORT_BYTES = 64 << 10
_LONG_NUMBER = re.compile(rb"\d{18}")
_HUGE_NUMBER = re.compile(rb"\d{18}|\d[eE]\+?\d{3}")
_CONTAINERS = (dict, list)
_UNKNOWN = object()
_NAME = re.compile(rb'"[ \t\r\n]*:')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLimits:
    """Limits of a JSON text.

    Attributes:
        depth: Nesting levels of objects and arrays.
        values: Commas; that is, all values except one per object and array.
        names: Names in one object.
    """

    depth: int = 128
    values: int = 1 << 20
    names: int = 65_536


DEFAULT_LIMITS = JsonLimits()


def decode_json(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> Any:
    """Decode a request body.

    Raises:
        RequestError: The text is not UTF-8, not JSON, or contains NaN, Infinity, a number beyond
            64 bits, a duplicate name, an unpaired surrogate, too many levels, values, or
            names in one object.
    """
    if body.count(b",") > limits.values:
        message = f"The body has more than limits.body_values={limits.values} values."
        raise RequestError(message, status=413, setting="limits.body_values")
    if (value := _quickly(body, limits)) is not _UNKNOWN:
        return value
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The body is not valid UTF-8: {error.reason} at byte {error.start}."
        ) from error
    try:
        value = _decoder(body, limits.names).decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise RequestError(f"The body is not valid JSON: {error.msg} at {where}.") from error
    except RecursionError as error:
        raise _too_deep(limits.depth) from error
    if b"\\u" in body and _SURROGATE.search(body):
        _refuse_lone_surrogates(body)
    if body.count(b"[") + body.count(b"{") > limits.depth:
        _check_depth(value, limits.depth)
    return value


def _quickly(body: bytes, limits: JsonLimits) -> Any:
    """Decode a short body with orjson; `_UNKNOWN` where the other decoder may say more."""
    # orjson keeps the interpreter's lock, so it gets short bodies only
    if len(body) > _SHORT_BYTES or _HUGE_NUMBER.search(body):
        return _UNKNOWN
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _UNKNOWN
    return value if _is_strict(value, body, limits) else _UNKNOWN


def _is_strict(value: Any, body: bytes, limits: JsonLimits) -> bool:
    """Whether what orjson decoded is known to keep the limits, and to lack no name.

    Orjson drops all but the last of equal names. There are at most as many names as quotes before
    colons; if the value has as many, it has them all. Text that contains such quotes is not known.
    """
    names, depth = 0, 0
    level = [value] if isinstance(value, _CONTAINERS) else []
    while level:
        if depth == limits.depth:
            return False
        depth += 1
        below: list[Any] = []
        for item in level:
            children = item
            if isinstance(item, dict):
                if len(item) > limits.names:
                    return False
                names += len(item)
                children = item.values()
            below += [child for child in children if isinstance(child, _CONTAINERS)]
        level = below
    return names == len(_NAME.findall(body))


def _decoder(body: bytes, max_names: int) -> json.JSONDecoder:
    # scanning a large body for long numbers would hold the interpreter's lock for too long
    careful = len(body) > _SHORT_BYTES or _LONG_NUMBER.search(body)
    parse_int = _bounded_int if careful else None
    return json.JSONDecoder(
        object_pairs_hook=partial(_object, max_names),
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=parse_int,
    )


def _object(most: int, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > most:
        message = f"An object of the body has more than limits.body_names={most} names."
        raise RequestError(message, setting="limits.body_names")
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


def _check_depth(value: Any, most: int) -> None:
    level, depth = [value], 0
    while level := [child for item in level for child in _containers(item)]:
        depth += 1
        if depth >= most:
            raise _too_deep(most)


def _too_deep(most: int) -> RequestError:
    message = f"The body is nested deeper than limits.body_depth={most} levels."
    return RequestError(message, setting="limits.body_depth")


def _containers(item: Any) -> list[Any]:
    children = item.values() if isinstance(item, dict) else item
    return [child for child in children if isinstance(child, dict | list)]
