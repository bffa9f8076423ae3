"""Packs a step's inputs into one buffer, so that they are uploaded by one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.runtime.platform.api import Event, Platform

_ALIGN = 16  # bytes; kernels use wider loads at addresses that are multiples of it
_WORD = 4


@dataclass(frozen=True, slots=True)
class StagedField:
    """An array of `size` numbers, or a matrix of `rows` rows of `size` numbers."""

    name: str
    size: int
    dtype: torch.dtype = torch.int32
    rows: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the field."""
        return self.size * (self.rows or 1) * self.dtype.itemsize


class StagedLayout:
    """Offsets of the fields in a buffer of `words` int32 numbers."""

    def __init__(self, fields: Iterable[StagedField]) -> None:
        self._places: dict[str, tuple[StagedField, int]] = {}
        at = 0
        for field in fields:
            self._places[field.name] = field, at
            at += -(-field.num_bytes // _ALIGN) * _ALIGN
        self.words = at // _WORD

    def views(self, buffer: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Views of the fields in an int32 buffer, by name."""
        whole = buffer.view(torch.uint8)
        found: dict[str, torch.Tensor] = {}
        for name, (field, at) in self._places.items():
            flat = whole[at : at + field.num_bytes].view(field.dtype)
            found[name] = flat if field.rows is None else flat.view(field.rows, field.size)
        return found


def step_layout(tokens: int, requests: int, groups: int = 1, samples: int = 0) -> StagedLayout:
    """Layout of a step's inputs for at most this many rows, requests and KV groups.

    `samples` counts sampled rows, one per request plus draft tokens; 0 if there are none.

    `in_flight_slots`: the request slot whose newest token a row reads; -1: the row has an id.
    `state_slots`: slots of recurrent states, -1 in padding.
    """
    per_token = ("input_ids", "positions", "token_types", "in_flight_slots")
    per_request = ("kv_lens", "req_slots", "state_slots")
    per_sample = ("sample_rows", "slots", "top_k", "count_rows")
    floats = ("temperature", "top_p", "min_p", "frequency", "presence", "repetition")
    longs = ("seed", "sample", "position")
    samples = max(samples, requests)
    return StagedLayout(
        [
            *(StagedField(name, tokens) for name in per_token),
            StagedField("slot_mappings", tokens, rows=groups),
            *(StagedField(name, requests) for name in per_request),
            *(StagedField(name, samples) for name in per_sample),
            StagedField("q_starts", requests + 1),
            *(StagedField(name, samples, torch.float32) for name in floats),
            *(StagedField(name, samples, torch.int64) for name in longs),
            StagedField("uniform", samples, torch.float64),
            StagedField("greedy", samples, torch.bool),
        ]
    )


class StagedInputs:
    """A step's inputs on the device, with one host copy per step in flight.

    Addresses never change, so captured graphs can read them.
    """

    def __init__(self, layout: StagedLayout, platform: Platform, copies: int) -> None:
        self._buffer = torch.zeros(layout.words, dtype=torch.int32, device=platform.device)
        self.device = layout.views(self._buffer)
        self._hosts = [HostInputs(layout, platform) for _ in range(copies)]
        self._turn = 0

    def host(self) -> HostInputs:
        """The next host copy, once the step that used it has read it."""
        self._turn = (self._turn + 1) % len(self._hosts)
        chosen = self._hosts[self._turn]
        if chosen.used is not None:
            chosen.used.wait()
            chosen.used = None
        return chosen

    def clear(self) -> None:
        """Set the inputs to a step of padding only."""
        self._buffer.zero_()

    def upload(self, host: HostInputs) -> None:
        """Copy all inputs to the device; inside `Stream.run`."""
        self._buffer.copy_(host.buffer, non_blocking=True)


class HostInputs:
    """One host copy: numpy arrays over pinned memory. `used` completes after the upload."""

    def __init__(self, layout: StagedLayout, platform: Platform) -> None:
        self.buffer = platform.pinned(layout.words, torch.int32)
        self.arrays: Mapping[str, np.ndarray] = {
            name: view.numpy() for name, view in layout.views(self.buffer).items()
        }
        self.used: Event | None = None
