"""JSON as RFC 8259 has it, with numbers that a double can hold."""

from __future__ import annotations

import json
import math
from typing import Any

_LONG = 300  # digits from which an integer may be beyond doubles


def loads(text: str) -> Any:
    """A JSON text, read.

    Raises:
        ValueError: it is not JSON, `NaN` and `Infinity` included, or has a number beyond doubles.
        RecursionError: it is nested too deep.
    """
    return json.loads(
        text, parse_constant=_constant, parse_float=_finite, parse_int=_finite_integer
    )


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is a number that no double can hold")
    return number


def _finite_integer(digits: str) -> int:
    if len(digits) >= _LONG:
        _finite(digits)
    return int(digits)
