"""Copies an object with a few changed attributes."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def variant(original: T, **changes: Any) -> T:
    """Like `dataclasses.replace`, for classes without slots, in a fraction of its time.

    Calls no method of the class: neither `__init__` nor `__post_init__` sees the changes.
    """
    made = object.__new__(type(original))
    vars(made).update(vars(original), **changes)
    return made
