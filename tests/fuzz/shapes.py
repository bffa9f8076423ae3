"""Hostile values and mutations: of JSON by its structure, of other formats by their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**9, -(2**63), 10**30,
    -0.0, 0.5, 1e308, -1e308, 5e-324,
    "", " ", "x", "NaN", "\x00", "\ud7ff\uffff", "\U0010ffff", "é" * 50, "a" * 5000, "-1",
    "../../x", "{{", "{% for x in y %}", "<|im_start|>", "(((((a*)*)*)*)*)*b",
    None, True, False, [], {}, [[]], [{}], [None], [-1], ["x", 1], {"x": "y"}, {"": None},
    {"type": "x"}, {"type": "object", "properties": {"a": {"$ref": "#"}}},
)  # fmt: skip
RAW = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 30, b'"\\ud800"', b"[" * 500, b"{}{}")
_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def mutate(data: bytes, random: Random, others: list[bytes]) -> bytes:
    """Another input much like `data`."""
    if data[:1] in (b"{", b"[") and random.random() < 0.8:
        mutated = _mutate_json(data, random)
        if mutated is not None:
            return mutated
    for _ in range(1 << random.randrange(4)):
        data = random.choice(_BYTES)(data, random, others)
    return data[: 1 << 20]


def _mutate_json(data: bytes, random: Random) -> bytes | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(1 << random.randrange(3)):
        value = _changed(value, random)
    raw = random.random() < 0.15  # what Python's encoder would not write
    try:
        text = json.dumps(_changed(value, random, leaf="@@") if raw else value).encode()
    except RecursionError:
        return None
    return text.replace(b'"@@"', random.choice(RAW))


def _changed(value: Any, random: Random, leaf: Any = None) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict | list) and value and random.random() < 0.8:
        key: Any = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copy: Any = value.copy()
        action = random.random()
        if action < 0.1 and leaf is None:
            del copy[key]
        elif action < 0.2 and leaf is None:
            return (
                copy | {random.choice(("x", "", "type", "\x00")): copy[key]}
                if isinstance(copy, dict)
                else copy + copy[key : key + 1] * random.choice((1, 2, 100))
            )
        else:
            copy[key] = _changed(copy[key], random, leaf)
        return copy
    if leaf is not None:
        return leaf
    if isinstance(value, int) and random.random() < 0.3:
        return value + random.choice((-1, 1))
    if isinstance(value, str) and random.random() < 0.3:
        at = random.randrange(len(value) + 1)
        return value[:at] + random.choice([v for v in VALUES if isinstance(v, str)]) + value[at:]
    if random.random() < 0.05:
        return _nested(value, random)
    return random.choice(VALUES)


def _nested(value: Any, random: Random) -> Any:
    for _ in range(random.choice((3, 130, 900))):
        value = [value] if random.random() < 0.5 else {"x": value}
    return value


def _flip(data: bytes, random: Random, _: list[bytes]) -> bytes:
    if not data:
        return b"\x00"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _number(data: bytes, random: Random, _: list[bytes]) -> bytes:
    size = random.choice((1, 2, 4, 8))
    at = random.randrange(max(1, len(data) - size + 1))
    value = random.choice(_INTERESTING) & ((1 << 8 * size) - 1)
    order = random.choice(("little", "big"))
    return data[:at] + value.to_bytes(size, order) + data[at + size :]  # type: ignore[arg-type]


def _cut(data: bytes, random: Random, _: list[bytes]) -> bytes:
    a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b:]


def _repeat(data: bytes, random: Random, _: list[bytes]) -> bytes:
    a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:b] * random.choice((1, 2, 50)) + data[b:]


def _insert(data: bytes, random: Random, _: list[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    some = random.choice(VALUES)
    text = some.encode("utf-8", "surrogatepass") if isinstance(some, str) else random.randbytes(4)
    return data[:at] + text + data[at:]


def _splice(data: bytes, random: Random, others: list[bytes]) -> bytes:
    other = random.choice(others) if others else data
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


_BYTES: tuple[Callable[[bytes, Random, list[bytes]], bytes], ...] = (
    _flip, _flip, _number, _number, _cut, _repeat, _insert, _splice,
)  # fmt: skip
