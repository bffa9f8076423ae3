"""Log probabilities, computed on the device and read after the step's event.

Shapes: P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.platform.api import Platform


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """A request for log probabilities of `count` rows of logits with the same options."""

    count: int
    options: LogprobOptions


class LogprobReader:
    """Host buffer for one request's log probabilities; `launch` fills it, `read` returns them."""

    def __init__(self, platform: Platform, wanted: LogprobRequest, vocab_size: int) -> None:
        self._wanted, self._vocab_size = wanted, vocab_size
        options, count = wanted.options, wanted.count
        self._top = min(options.top, vocab_size)
        self._own = platform.pinned(count, torch.float32)
        self._top_values = platform.pinned(count * self._top, torch.float32)
        self._top_ids = platform.pinned(count * self._top, torch.int32)
        self._chosen = platform.pinned(count * len(options.token_ids), torch.float32)
        self._ids = platform.pinned(len(options.token_ids), torch.int64)
        self._ids.numpy()[:] = np.clip(options.token_ids, 0, vocab_size - 1)

    def launch(self, logits_PV: torch.Tensor, ids_P: torch.Tensor, start: int = 0) -> None:
        """Queue positions from `start` on; results for id -1 are undefined. Inside `Stream.run`."""
        logprobs = torch.log_softmax(logits_PV, -1)
        stop = start + len(logits_PV)
        own = logprobs.gather(-1, ids_P.clamp_min(0).long()[:, None])[:, 0]
        self._own[start:stop].copy_(own, non_blocking=True)
        if self._top:
            values, ids = logprobs.topk(self._top, -1)
            by_id = ids.argsort(-1)  # ties by ascending id
            values, order = torch.sort(
                values.gather(-1, by_id), dim=-1, descending=True, stable=True
            )
            ids = ids.gather(-1, by_id).gather(-1, order)
            part = slice(start * self._top, stop * self._top)
            self._top_values[part].copy_(values.flatten(), non_blocking=True)
            self._top_ids[part].copy_(ids.flatten().int(), non_blocking=True)
        if count := len(self._ids):
            index = self._ids.to(logits_PV.device, non_blocking=True)
            part = slice(start * count, stop * count)
            self._chosen[part].copy_(logprobs[:, index].flatten(), non_blocking=True)

    def read(self, token_ids: IntArray) -> TokenLogprobs:
        """The log probabilities of the ids passed to `launch`."""
        count, chosen = self._wanted.count, len(self._ids)
        return TokenLogprobs(
            token_ids=token_ids,
            logprobs=self._own.numpy().copy(),
            top_ids=self._top_ids.numpy().reshape(count, -1).copy() if self._top else None,
            top_logprobs=self._top_values.numpy().reshape(count, -1).copy() if self._top else None,
            chosen_logprobs=self._chosen.numpy().reshape(count, -1).copy() if chosen else None,
        )


def sampled_logits(logits_RV: torch.Tensor, row: int, temperature: float) -> torch.Tensor:
    """Logits for the log probability of a sampled token: float32 (1, V)."""
    most = torch.finfo(torch.float32).max
    row_1V = logits_RV[row : row + 1]
    return row_1V.nan_to_num(nan=float("-inf"), posinf=most, neginf=float("-inf")) / temperature


def index_on(platform: Platform, rows: Sequence[int] | IntArray) -> torch.Tensor:
    """Row indices as pinned int64, ready to upload inside `Stream.run`."""
    index = platform.pinned(len(rows), torch.int64)
    index.numpy()[:] = rows
    return index
