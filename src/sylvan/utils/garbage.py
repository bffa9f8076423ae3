"""When Python looks for cycles among its objects: never over a large cache between two steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 2000
"""Number of additional objects that triggers a look at the new ones: 0.1 to 0.5 ms."""

YOUNG_PASSES = 0
"""After each second of those looks what the first one left is looked at too, and is old then."""

OLD_PASSES = 750
"""Young collections per full one: millions of objects later, so only if something leaks."""


def freeze(young_objects: int = YOUNG_OBJECTS) -> None:
    """Look for cycles now, and spare what lives from all later looks.

    For a process that is at rest. A walk over the nodes of a full prefix tree takes 0.1 s and finds
    nothing, as the scheduler makes no cycles; by Python's defaults it comes whenever the tree has
    grown by a quarter. Frozen objects are still freed when their last reference goes.

    Args:
        young_objects: When new objects are looked at. A program that may pause does it the more
            rarely the larger this is, and more of them are gone by then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young_objects, YOUNG_PASSES, OLD_PASSES)


@contextmanager
def postponed() -> Iterator[None]:
    """Look for no cycles meanwhile.

    For starts: imports make a million objects that live on, over which Python would walk again and
    again, for a fifth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare() -> None:
    """Spare what there is from all later looks: right after imports, of which next to all lives.

    Cycles that are garbage by now stay; where there may be large ones, `freeze`.
    """
    gc.freeze()
