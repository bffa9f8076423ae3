"""Selects the sampling kernels of a device."""

from __future__ import annotations

from typing import Any

import torch

from sylvan.kernels.gpu.choice import kernels_for
from sylvan.kernels.sample.device import LogitEdits, RowParams
from sylvan.runtime.sampling.on_device import (
    DeviceLogitEdits,
    DeviceRowParams,
    DeviceSampling,
    TorchSampling,
)


class TritonSampling:
    """Triton kernels that edit logits and sample without sorting."""

    generates_random = True

    def __init__(self, kernels: Any) -> None:
        """`kernels`: a module with `edit` and `draw`, as `kernels.sample.triton_sample`."""
        self._kernels = kernels

    def edit(self, logits_RV: torch.Tensor, edits: DeviceLogitEdits) -> None:
        parts: dict[str, torch.Tensor] = {}
        if (p := edits.penalties) is not None:
            parts |= {
                "counts": p.counts,
                "count_rows": p.count_rows,
                "frequency": p.frequency,
                "presence": p.presence,
                "repetition": p.repetition,
            }
        if (masks := edits.masks) is not None:
            parts |= {"mask_bits": masks.bits, "mask_rows": masks.rows}
        if (entries := edits.entries) is not None:
            parts |= {
                "entry_rows": entries.rows,
                "entry_ids": entries.ids,
                "entry_values": entries.values,
            }
        self._kernels.edit(logits_RV, LogitEdits(**parts))

    def draw(
        self, logits_RV: torch.Tensor, rows: DeviceRowParams | None, *, filtered: bool = True
    ) -> torch.Tensor:
        if rows is None:
            return TorchSampling().draw(logits_RV, None)
        chosen = RowParams(
            greedy=rows.greedy,
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            seed=rows.seed,
            sample=rows.sample,
            position=rows.position,
        )
        return self._kernels.draw(logits_RV, chosen, filtered=filtered).ids


def device_sampling(device: torch.device) -> DeviceSampling:
    """Return the kernels for this device, imported on demand; None if there are none."""
    kernels = kernels_for("sample", device)
    return TorchSampling() if kernels is None else TritonSampling(kernels)
