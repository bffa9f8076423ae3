"""Copies of objects in which a few attributes differ."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def variant(original: T, **changes: Any) -> T:
    """As `dataclasses.replace`, for classes without slots, in a fraction of its time.

    Nothing of the class is called: `changes` are taken as they are.
    """
    made = object.__new__(type(original))
    vars(made).update(vars(original), **changes)
    return made
