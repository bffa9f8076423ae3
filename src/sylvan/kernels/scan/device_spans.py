"""Rows, state slots and saves of the requests of a step, in device memory; the host reads none.

Shapes: R requests, N saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.scan.spans import Spans


@dataclass(frozen=True, slots=True)
class DeviceSpans:
    """See `Spans`; all int32.

    Attributes:
        starts_R1: First row of each request, and the end.
        slots_R: State slot of each request; -1: padding, whose state is not written.
        first_saves_R1: First save of each request in `saves_N3`, and the end; None: no saves.
        saves_N3: Request, number of rows and slot of each save, ordered by request, then rows.
    """

    starts_R1: torch.Tensor
    slots_R: torch.Tensor
    first_saves_R1: torch.Tensor | None = None
    saves_N3: torch.Tensor | None = None

    @staticmethod
    def of(spans: Spans, device: torch.device) -> DeviceSpans:
        """Copy host spans to a device."""
        kind = {"dtype": torch.int32, "device": device}
        starts, slots = torch.tensor(spans.starts, **kind), torch.tensor(spans.slots, **kind)
        if not spans.saves:
            return DeviceSpans(starts, slots)
        saves = sorted(spans.saves)
        firsts = [sum(save[0] < r for save in saves) for r in range(len(spans.slots) + 1)]
        return DeviceSpans(starts, slots, torch.tensor(firsts, **kind), torch.tensor(saves, **kind))

    def on_host(self) -> Spans:
        """Copy to the host, without padding; waits for the device."""
        starts, slots = self.starts_R1.tolist(), self.slots_R.tolist()
        count = next((r for r, slot in enumerate(slots) if slot < 0), len(slots))
        saves = [] if self.saves_N3 is None else self.saves_N3.tolist()
        return Spans(
            tuple(starts[: count + 1]),
            tuple(slots[:count]),
            tuple((request, rows, slot) for request, rows, slot in saves),
        )
