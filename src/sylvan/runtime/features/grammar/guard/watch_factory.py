"""Makes watches for outputs of grammars that do not enforce their whole schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from sylvan.runtime.features.grammar.guard.conditions import Conditions
from sylvan.runtime.features.grammar.guard.regions import TagWatch, guarded_regions
from sylvan.runtime.features.grammar.guard.relax import WHOLE
from sylvan.runtime.features.grammar.guard.watch import JsonWatch
from sylvan.runtime.features.grammar.schema import object_schema
from sylvan.runtime.features.grammar.spec import GrammarSpec


def watch_factory(
    spec: GrammarSpec, lost: Mapping[str, Iterable[str]]
) -> Callable[[], JsonWatch | TagWatch]:
    """Return a factory of watches.

    Args:
        spec: As the client wrote it.
        lost: What its grammar does not enforce; see `relax.Unenforced`.

    Raises:
        RequestError: A schema is invalid.
    """
    if WHOLE in lost:
        conditions = Conditions(object_schema(spec), frozenset(lost[WHOLE]))
        return partial(JsonWatch, conditions)
    keywords = {place: tuple(found) for place, found in lost.items()}
    return partial(TagWatch, guarded_regions(spec, keywords))
