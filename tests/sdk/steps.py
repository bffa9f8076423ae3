"""Shared by all tours in Python; runs in environments with only a client installed."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

MODEL = "sapling"
EMBEDDER = "tiny-bert"
KEY = "secret"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": WEATHER,
        "strict": True,
    },
}
# what the model writes when it calls twice; whatever its weights are, a grammar makes it
_CALL = (
    r'<tool_call>\n\{"name": "get_weather", "arguments": '
    r'\{"city": "(Paris|Rome)", "days": [1-3]\}\}\n</tool_call>'
)
TWO_CALLS = rf"{_CALL}\n{_CALL}"

Step = Callable[[], None]
_STEPS: list[Step] = []


class Caught:
    """The error that a block ended with."""

    error: Any = None


@contextmanager
def raises(kind: type[Exception]) -> Iterator[Caught]:
    """The block must end with an error of that kind."""
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
    if caught.error is None:
        raise AssertionError(f"{kind.__name__} expected")


def step(function: Step) -> Step:
    """A step of the tour; they run in the order of the file."""
    _STEPS.append(function)
    return function


def near(a: Sequence[float], b: Sequence[float]) -> None:
    """Whether two vectors are equal but for rounding."""
    assert len(a) == len(b), (len(a), len(b))
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-5


def check_vectors(vectors: Sequence[Sequence[float]], count: int) -> None:
    """Whether they are so many, of unit length, and not all the same."""
    assert len(vectors) == count, len(vectors)
    for vector in vectors:
        assert abs(sum(x * x for x in vector) - 1) < 1e-4, vector
    assert count < 2 or list(vectors[0]) != list(vectors[1])


def check(arguments: object) -> None:
    """Whether arguments of `get_weather` follow its schema."""
    assert isinstance(arguments, dict), arguments
    assert arguments["city"] in ("Paris", "Rome"), arguments
    assert arguments["days"] in (1, 2, 3), arguments


def run(package: str) -> None:
    """Run all steps; exits with 1 if one fails."""
    print(f"{package} {version(package)}", flush=True)
    failed = 0
    for function in _STEPS:
        began = time.perf_counter()
        try:
            function()
        except Exception:
            failed += 1
            print(f"  FAILED    {function.__name__}", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            print(
                f"  ok        {function.__name__} {time.perf_counter() - began:.1f} s", flush=True
            )
    sys.exit(1 if failed else 0)
