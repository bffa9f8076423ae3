"""One step's work on recurrent states, and the memory it works on.

Shapes: R requests of the step, S state slots.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np


class StateWork(msgspec.Struct, frozen=True):
    """Work of one step on recurrent states.

    `copies` (source, target) come first. Then request r continues from slot slots[r] (R,) and
    stores its new state there. `saves` (request, tokens, slot): also save the state after that many
    of its tokens of this step in that slot.
    """

    slots: np.ndarray  # int32
    copies: tuple[tuple[int, int], ...] = ()
    saves: tuple[tuple[int, int, int], ...] = ()


class StatePool(Protocol):
    """Memory for recurrent states: one tensor (S, ...) per part of each layer, in model order.

    Slot 0 is zero: the initial state.

    Attributes:
        num_slots: Slots for requests and cached prefixes.
        num_branches: Extra slots after those, for the states between the draft tokens of one step.
    """

    num_slots: int
    num_branches: int

    def part(self, index: int) -> Any:
        """All slots of one part."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy all parts of one slot into another."""
        ...
