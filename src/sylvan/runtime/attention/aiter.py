"""Attention by AMD's aiter, an optional package. Plans on the host in every step.

Source: `mha_batch_prefill_func` of https://github.com/ROCm/aiter, whose pages are single tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """KV slots of the tokens that requests attend to, on the device: int32 tensors.

    Request r has rows q_starts[r] to q_starts[r + 1] and slots[starts[r]] to slots[starts[r + 1]].
    """

    q_starts: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    max_rows: int
    max_tokens: int


def token_index(batch: ForwardBatch, group: int = 0, window: int | None = None) -> TokenIndex:
    """Build the index from host arrays; a request's tokens start at the first page of its window.

    Args:
        batch: The step.
        group: KV group whose page table is read.
        window: Window of the layers; None: full attention.
    """
    host, count, size = batch.host, batch.num_reqs, batch.kv.page_size
    lens, q_starts = host.kv_lens[:count], host.q_starts[: count + 1]
    rows = np.diff(q_starts)
    first = np.zeros(count, np.int32)
    if window is not None:
        first = np.maximum(lens - rows - window + 1, 0) // size * size
    seen = lens - first
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(seen, out=starts[1:])
    place = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1] - first, seen)
    pages = host.page_tables[group][np.repeat(host.req_slots[:count], seen), place // size]
    slots = pages * size + place % size
    device = batch.positions_T.device
    parts = (q_starts.copy(), starts, slots)
    return TokenIndex(
        *(torch.from_numpy(x.astype(np.int32)).to(device) for x in parts),
        max_rows=int(rows.max(initial=1)),
        max_tokens=int(seen.max(initial=1)),
    )


class AiterAttention:
    """One call for all requests of a step; layers of a group and window share an index."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"rocm"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        max_head_dim=256,
    )

    def __init__(self, library: ModuleType | None = None) -> None:
        """`library`: replaces the installed package in tests.

        Raises:
            ConfigError: aiter is not installed, or another package of that name is.
        """
        if library is None and importlib.util.find_spec("aiter") is None:
            raise ConfigError(
                "attention=aiter: AMD's aiter is not installed; pip install amd-aiter, or leave "
                "attention at auto"
            )
        self._library: Any = library or importlib.import_module("aiter")
        if not hasattr(self._library, "mha_batch_prefill_func"):  # another package has the name
            raise ConfigError(
                "attention=aiter: the installed package aiter has no mha_batch_prefill_func; pip "
                "install amd-aiter in its place, or leave attention at auto"
            )
        self._indices: dict[tuple[int, int | None], TokenIndex] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Drop the indices of the last step; layers build theirs when they run."""
        self._indices.clear()

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if spec.sinks is not None:
            raise ConfigError("attention=aiter has no sinks; leave attention at auto")
        batch.kv.store(spec.index, batch.slots_of(spec.index), k_TKH, v_TKH)
        keys, values = (pages.flatten(0, 1) for pages in batch.kv.layer(spec.index))
        which = batch.kv.layer_groups[spec.index], spec.window
        if which not in self._indices:
            self._indices[which] = token_index(batch, *which)
        index = self._indices[which]
        return self._library.mha_batch_prefill_func(
            q_TNH,
            keys,
            values,
            index.q_starts,
            index.starts,
            index.slots,
            index.max_rows,
            index.max_tokens,
            softmax_scale=spec.scale,
            logits_soft_cap=spec.softcap or 0.0,
            causal=spec.causal,
            window_size=(-1 if spec.window is None else spec.window - 1, -1),
        )


BACKEND = AiterAttention
