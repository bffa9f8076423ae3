"""Shared by rules: the document, the remaining budget, and negation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sylvan.runtime.features.grammar.rewrite.kinds import ALL, Kinds
from sylvan.runtime.features.grammar.schema import Schema, resolve
from sylvan.runtime.features.grammar.spec import NotSupportedError

MAX_SCHEMAS = 50_000
"""Most schemas that rewriting one schema may create."""


class UndecidedError(Exception):
    """A keyword has no equivalent here; the message says which, and why."""


class Budget:
    """Limits how many schemas rewriting creates.

    Args:
        left: The remaining number.
    """

    def __init__(self, left: int = MAX_SCHEMAS) -> None:
        self._most = self._left = left

    def spend(self, count: int = 1) -> None:
        """Create some more.

        Raises:
            NotSupportedError: There are too many; the message names the limit.
        """
        self._left -= count
        if self._left < 0:
            message = "json_schema: written without `not`, `oneOf` and the like it has more than"
            message += f" {self._most} parts"
            raise NotSupportedError(message, param="json_schema")


@dataclass(frozen=True, slots=True)
class RewriteContext:
    """The services that rules use.

    Attributes:
        root: The document; all references in it are `#` or `#/a/pointer`.
        budget: Budget of the whole document.
        negate: Returns a schema for values, of some kinds, that are invalid by another; values of
            other kinds may or may not be valid by it. Raises UndecidedError.
    """

    root: Schema
    budget: Budget
    negate: Callable[[Any, Kinds], Any]

    def deny(self, schema: Any, within: Kinds = ALL) -> Any:
        return self.negate(schema, within)

    def follow(self, reference: Any) -> Any:
        """Return the schema that a reference names.

        Raises:
            UndecidedError: There is none.
        """
        found = resolve(self.root, reference)
        if found is None:
            raise UndecidedError("a reference to nowhere")
        return found


def any_of(schemas: list[Any]) -> Any:
    """Return a schema for values that are valid by one of several."""
    kept = [schema for schema in schemas if schema is not False]
    if any(schema is True or schema == {} for schema in kept):
        return True
    if len(kept) < 2:
        return kept[0] if kept else False
    return {"anyOf": kept}


def all_of(schemas: list[Any]) -> Any:
    """Return a schema for values that are valid by all of several."""
    kept = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in kept):
        return False
    if len(kept) < 2:
        return kept[0] if kept else True
    return {"allOf": kept}
