"""Parses JSON strictly by RFC 8259, and rejects numbers beyond the range of a double."""

from __future__ import annotations

import json
import math
from typing import Any

_LONG = 300  # digits from which an integer may be beyond doubles


def loads(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: It is not JSON (nor are `NaN` and `Infinity`), or a number is out of range.
        RecursionError: It is nested too deep.
    """
    return json.loads(
        text, parse_constant=_constant, parse_float=_finite, parse_int=_finite_integer
    )


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is beyond the range of a double")
    return number


def _finite_integer(digits: str) -> int:
    if len(digits) >= _LONG:
        _finite(digits)
    return int(digits)
