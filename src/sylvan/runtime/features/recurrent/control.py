"""Tracks the recurrent state of each request, and saves states along prompts.

A state is saved at the last page boundary of each step's part of a prompt, at the last boundary
that a repetition of the prompt can start from, and where another prompt left a cached prefix
without a state. The cache itself saves the state of a finished request.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.states import StateSlots
from sylvan.runtime.cache.types import CacheKey, RunningState
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.core.states import StateWork
from sylvan.runtime.sched.capability import Capability


class RecurrentStates(Capability):
    """Control half: plans copies, slots and saves. Absent for pure attention models."""

    name: ClassVar = "recurrent"
    work_type: ClassVar = StateWork
    report_type: ClassVar = dict[int, int]

    def __init__(self, cache: KVCacheManager, states: StateSlots) -> None:
        self._cache, self._states = cache, states

    def plan_work(self, batch: Batch) -> StateWork | None:
        slots = np.zeros(len(batch.slices), np.int32)
        copies: list[tuple[int, int]] = []
        saves: list[tuple[int, int, int]] = []
        for index, piece in enumerate(batch.slices):
            state = piece.req.kv.state if piece.req.kv else None
            assert state is not None, "a slice of a request without state"
            slots[index] = state.slot
            if piece.start == state.begun:
                copies.append((state.source, state.slot))
            state.at = piece.stop  # first, because the source may be freed from now on
            state.saves = self._saves(piece, state)
            saves += [(index, tokens - piece.start, slot) for tokens, slot in state.saves]
        self._states.launched()
        return StateWork(slots, tuple(copies), tuple(saves)) if batch.slices else None

    def on_result(self, batch: Batch, report: dict[int, int] | None) -> None:
        """Record the number of accepted drafts."""
        for index, accepted in (report or {}).items():
            kv = batch.slices[index].req.kv
            if kv is not None and kv.state is not None:
                kv.state.at += accepted

    def _saves(self, piece: Slice, state: RunningState) -> tuple[tuple[int, int], ...]:
        req = piece.req
        if piece.start >= req.prompt_len or req.kv is None:
            return ()
        known = min(piece.stop, len(req.tokens))
        saves: list[tuple[int, int]] = []
        for tokens in sorted(self._boundaries(req, known, state)):
            if piece.start < tokens <= known:
                key = req.kv.key
                ids = req.tokens.view(0, tokens)
                slot = self._states.save(CacheKey(ids, key.namespace, key.media))
                saves += [(tokens, slot)] if slot else []
        return tuple(saves)

    def _boundaries(self, req: Req, known: int, state: RunningState) -> set[int]:
        size = self._cache.page_size
        return {known // size * size, (req.prompt_len - 1) // size * size, state.checkpoint_at}
