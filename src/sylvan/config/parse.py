"""Converts given values to the types of their fields."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, cast, get_args, get_origin

import msgspec

from sylvan.config.fields import Field, Member, nearest
from sylvan.config.sglang_values import alternative_to
from sylvan.config.values import Secret

_TRUE = frozenset({"true", "on", "yes", "1"})
_FALSE = frozenset({"false", "off", "no", "0"})
SWITCH_WORDS = _TRUE | _FALSE
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

# Words of other servers and common ones, mapped to ours.
SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"},
    "load_cache": {"off": "none"},
    "attention": {"torch_native": "torch", "intel_amx": "native"},
    "scheduler.policy": {"shortest-prefill-first": "shortest_prefill"},
    "observe.log_level": {"warn": "warning", "critical": "error"},
}
# Values that are names of modules.
PLUG_INS = ("device", "scheduler.policy", "cache.eviction", "attention", "grammar.backend")
ROUTE_PLUG_INS = ("routing.policy", "routing.prefill_policy", "routing.decode_policy")


_ITEMS: Mapping[object, Callable[[str], object]] = {int: int, float: float, Secret: Secret}
"""Readers of list items that are not text."""


def _reader_of(kind: object) -> Callable[[str], object]:
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    metas = [meta for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    if any(meta.extra and "unit" in meta.extra for meta in metas):
        return _whole_size
    return _ITEMS.get(base, str)


def _whole_size(text: str) -> int:
    size = parse_size(text)
    if size is None:
        raise ValueError(text)
    return size


def parse(field: Field, raw: object) -> object:
    """Convert and check a value.

    Raises:
        ValueError: it has the wrong type or is out of range; says what is expected.
    """
    value = _read(field, raw)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(_expected(field, raw))
    try:
        return msgspec.convert(value, field.type, dec_hook=_known_object)
    except msgspec.ValidationError as error:
        raise ValueError(_expected(field, raw)) from error


def _read(field: Field, raw: object) -> object:
    if isinstance(raw, str):
        if field.is_secret and not raw.strip():  # such as an empty variable
            raise ValueError("expected a secret that is not empty; leave it out to have none")
        return _from_text(field, raw)
    if isinstance(raw, bool):  # YAML reads the words on and off as booleans
        word = "on" if raw else "off"
        if word in field.choices or word in SYNONYMS.get(field.path, {}):
            return _from_text(field, word)
    if isinstance(raw, list):
        try:
            return _from_list(field, cast("list[object]", raw))
        except ValueError as error:
            raise ValueError(_expected(field, cast("object", raw))) from error
    return raw


def _from_list(field: Field, raw: list[object]) -> tuple[object, ...]:
    """Convert the words of the command line to the field's items."""
    kinds = [get_args(m.base)[0] for m in field.members if get_origin(m.base) is tuple]
    read = _reader_of(kinds[0] if kinds else str)
    return tuple(read(item) if isinstance(item, str) else item for item in raw)


def parse_size(text: str) -> int | None:
    """Read `32k`, `32Ki`, `2GiB`, `0.5g`; None if it is not a size. A bare number must be whole."""
    match = _SIZE.fullmatch(text)
    if not match:
        return None
    number, prefix, binary, _ = match.groups()
    if not prefix:
        return int(number) if number.isdigit() and not binary else None
    return int(float(number) * (1024 if binary else 1000) ** _POWER[prefix.lower()])


def _from_text(field: Field, text: str) -> object:
    text = SYNONYMS.get(field.path, {}).get(text.lower(), text)
    if field.path in PLUG_INS or field.path in ROUTE_PLUG_INS:
        text = text.replace("-", "_")
    for member in sorted(field.members, key=_specific_first):
        try:
            return _READERS[_kind(member)](member, text)
        except ValueError:
            continue
    raise ValueError(_expected(field, text))


def _kind(member: Member) -> object:
    if member.meta is not None and (member.meta.extra or {}).get("unit"):
        return "size"
    return get_origin(member.base) or member.base


def _specific_first(member: Member) -> int:
    order: tuple[object, ...] = (Literal, type(None), bool, "size", int, float)
    kind = _kind(member)
    return order.index(kind) if kind in order else len(order)


def _literal(member: Member, text: str) -> object:
    for word in get_args(member.base):
        if text.lower() == word:
            return word
    raise ValueError(text)


def _none(_: Member, text: str) -> None:
    if text.lower() not in ("none", "null", ""):
        raise ValueError(text)


def _bool(_: Member, text: str) -> bool:
    if text.lower() not in SWITCH_WORDS:
        raise ValueError(text)
    return text.lower() in _TRUE


def _size(_: Member, text: str) -> int:
    return _whole_size(text)


def _tuple(member: Member, text: str) -> tuple[object, ...]:
    if text.lstrip().startswith("["):
        return tuple(json.loads(text))
    read = _reader_of(get_args(member.base)[0])
    return tuple(read(part.strip()) for part in text.split(",") if part.strip())


def _dict(member: Member, text: str) -> dict[str, object]:
    if text.lstrip().startswith("{"):
        return json.loads(text)
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(key and sign for key, sign, _ in pairs):
        raise ValueError(text)
    read = _str if get_args(member.base)[1] is str else _json
    return {key.strip(): read(member, value.strip()) for key, _, value in pairs}


def _json(_: Member, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _int(_: Member, text: str) -> int:
    return int(text)


def _float(_: Member, text: str) -> float:
    return float(text)


def _secret(_: Member, text: str) -> Secret:
    return Secret(text)


def _str(_: Member, text: str) -> str:
    return text


_READERS: Mapping[object, Callable[[Member, str], object]] = {
    Literal: _literal,
    type(None): _none,
    bool: _bool,
    "size": _size,
    int: _int,
    float: _float,
    tuple: _tuple,
    dict: _dict,
    Secret: _secret,
    str: _str,
}


def _known_object(kind: type, value: object) -> object:
    if isinstance(value, kind):
        return value
    raise ValueError(f"expected {kind.__name__}")


def _expected(field: Field, raw: object) -> str:
    if field.is_secret:
        return f"expected {field.type_text}"
    if way := alternative_to(field.path, raw):
        return f"{raw} is not supported: {way}"
    hint = nearest(raw, field.choices) if isinstance(raw, str) else ""
    return f"expected {field.type_text}, got {raw!r}{hint}"
