"""Which rows belong to which request, in a device's memory: nothing of it is read by the host.

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
        slots_R: Where its state lies; -1: a request of padding, whose state nobody keeps.
        first_saves_R1: First save of each request in `saves_N3`, and the end; None: no saves.
        saves_N3: Request, rows and slot of each save, in the order of requests, then of rows.
    """

    starts_R1: torch.Tensor
    slots_R: torch.Tensor
    first_saves_R1: torch.Tensor | None = None
    saves_N3: torch.Tensor | None = None

    @staticmethod
    def of(spans: Spans, device: torch.device) -> DeviceSpans:
        """A copy of host numbers on a device."""
        kind = {"dtype": torch.int32, "device": device}
        starts, slots = torch.tensor(spans.starts, **kind), torch.tensor(spans.slots, **kind)
        if not spans.saves:
            return DeviceSpans(starts, slots)
        saves = sorted(spans.saves)
        firsts = [sum(save[0] < r for save in saves) for r in range(len(spans.slots) + 1)]
        return DeviceSpans(starts, slots, torch.tensor(firsts, **kind), torch.tensor(saves, **kind))

    def on_host(self) -> Spans:
        """The same as numbers, which waits for the device; without padding."""
        starts, slots = self.starts_R1.tolist(), self.slots_R.tolist()
        count = next((r for r, slot in enumerate(slots) if slot < 0), len(slots))
        saves = [] if self.saves_N3 is None else self.saves_N3.tolist()
        return Spans(
            tuple(starts[: count + 1]),
            tuple(slots[:count]),
            tuple((request, rows, slot) for request, rows, slot in saves),
        )
