"""Follows what recurrent layers have seen of each request, and keeps their state along prompts.

A state is kept at the last page boundary of each step's share of a prompt, at the last one that a
repetition of the prompt can start from, and where another prompt left a cached one without a state
there. What a request had seen when it ends is kept by the cache itself.
"""

from __future__ import annotations

from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.states import StateSlots
from sylvan.runtime.cache.types import CacheKey, RunningState
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.sched.feature import Feature


class StateKeeper(Feature):
    """The scheduler has one if its cache has states; there is none where all layers attend."""

    def __init__(self, cache: KVCacheManager, states: StateSlots) -> None:
        self._cache, self._states = cache, states

    def on_batch(self, batch: Batch) -> None:
        """See `Feature.on_batch`."""
        for piece in batch.slices:
            kv = piece.req.kv
            if kv is None or kv.state is None:
                continue
            kv.state.at = piece.stop  # first: its source may be given up from now on
            kv.state.saves = self._saves(piece, kv.state)
        self._states.launched()

    def _saves(self, piece: Slice, state: RunningState) -> tuple[tuple[int, int], ...]:
        req = piece.req
        if piece.start >= req.prompt_len or req.kv is None:
            return ()
        known = min(piece.stop, len(req.tokens))
        saves: list[tuple[int, int]] = []
        for tokens in sorted(self._places(req, known, state)):
            if piece.start < tokens <= known:
                key = req.kv.key
                ids = req.tokens.view(0, tokens)
                slot = self._states.save(CacheKey(ids, key.namespace, key.media))
                saves += [(tokens, slot)] if slot else []
        return tuple(saves)

    def _places(self, req: Req, known: int, state: RunningState) -> set[int]:
        size = self._cache.page_size
        return {known // size * size, (req.prompt_len - 1) // size * size, state.checkpoint_at}
