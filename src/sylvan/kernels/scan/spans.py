"""Rows, state slots and state copies (saves) of the requests of a step.

Shapes: R requests, n of them with rows left, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(states (n, ...) of n requests, their rows (n,)) -> (new states, outputs (n, ...))."""


@dataclass(frozen=True, slots=True)
class Spans:
    """`starts` has R + 1 entries. `saves` (request, rows, slot): the state after `rows` rows."""

    starts: tuple[int, ...]
    slots: tuple[int, ...]
    saves: tuple[tuple[int, int, int], ...] = ()

    @property
    def lens(self) -> list[int]:
        """Number of rows of each request."""
        return [b - a for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def scan(self, state_S: torch.Tensor, out_T: torch.Tensor, step: Step) -> torch.Tensor:
        """See the function `scan`."""
        return _scanned(state_S, self, out_T, step)


def scan(state_S: torch.Tensor, spans: Spans, out_T: torch.Tensor, step: Step) -> torch.Tensor:
    """Process one row of every request at a time; requests with the most rows come first.

    Args:
        state_S: All slots of one state; those of the requests and `saves` are written.
        spans: Rows and slots.
        out_T: Receives the outputs; returned.
        step: The recurrence.
    """
    return spans.scan(state_S, out_T, step)


def _scanned(state_S: torch.Tensor, spans: Spans, out_T: torch.Tensor, step: Step) -> torch.Tensor:
    lens = spans.lens
    order = sorted(range(len(lens)), key=lambda r: -lens[r])
    slots_R = torch.tensor([spans.slots[r] for r in order], device=state_S.device)
    first_R = torch.tensor([spans.starts[r] for r in order], device=state_S.device)
    saves: dict[int, list[tuple[int, int]]] = {}
    for request, tokens, slot in spans.saves:
        saves.setdefault(tokens, []).append((order.index(request), slot))
    held = state_S[slots_R]
    active = len(order)
    for at in range(lens[order[0]] if order else 0):
        while lens[order[active - 1]] <= at:
            active -= 1
        rows_n = first_R[:active] + at
        new, out_n = step(held[:active], rows_n)
        held[:active] = new
        out_T[rows_n] = out_n.to(out_T.dtype)
        for place, slot in saves.get(at + 1, ()):
            state_S[slot] = held[place]
    state_S[slots_R] = held
    return out_T
