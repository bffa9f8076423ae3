"""One step's work on recurrent states, and the memory it works on.

Shapes: R requests of the step, S state slots.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np


class StateWork(msgspec.Struct, frozen=True):
    """What a step does with states.

    `copies` (source, target) come first. Then request r goes on from slot slots[r] (R,) and leaves
    its new state there. `saves` (request, tokens, slot): the state after so many of its tokens of
    this step is kept in that slot too.
    """

    slots: np.ndarray  # int32
    copies: tuple[tuple[int, int], ...] = ()
    saves: tuple[tuple[int, int, int], ...] = ()


class StatePool(Protocol):
    """Memory for states: one tensor (S, ...) for each part of each layer, as the model counts them.

    Slot 0 is zero: the state that has seen nothing.

    Attributes:
        num_slots: Of requests and cached prefixes.
        num_branches: Slots behind those, for the states between the guesses of one step.
    """

    num_slots: int
    num_branches: int

    def part(self, index: int) -> Any:
        """All slots of one part."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy all parts of one slot into another."""
        ...
