"""The part of a step that is most of nearly all steps: requests that decode their next token."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.core.req import NO_GROWTH, Growth, Req, Slice


class Decodes:
    """Plans all decoding requests at once, and reuses their slice objects from step to step.

    Usable only when no step is in flight during planning, because a step in flight owns its slices.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._slices: tuple[Slice, ...] = ()  # slices of the previous step, if it only decoded
        self.growth = NO_GROWTH  # page growth of the slices planned last

    def plan(self, running: Sequence[Req]) -> tuple[list[Slice], list[Req]] | None:
        """Return the decode slices, and the other requests in order.

        Returns None, changing nothing, if memory is short.
        """
        page_size = self._cache.page_size
        slices: list[Slice] = []
        others: list[Req] = []
        grown: list[Req] = []
        for req in running:
            start, kv = req.computed, req.kv
            if req.tokens.length != start + 1 or start < req.prompt_len or req.pending or not kv:
                others.append(req)
                continue
            if start >= kv.num_pages * page_size:
                grown.append(req)
            piece = req.decode
            if piece is None:
                piece = req.decode = Slice(req, start, start + 1, True)
            piece.start = start
            piece.stop = req.computed = start + 1
            req.pending = 1
            slices.append(piece)
        if not grown:
            self.growth = NO_GROWTH
            return slices, others
        pages = self._cache.grow([req.kv for req in grown if req.kv is not None])
        if pages is None:
            for piece in slices:
                piece.req.computed, piece.req.pending = piece.start, 0
            return None
        self.growth = Growth(tuple(grown), pages)
        return slices, others

    def whole_step(self, slices: Sequence[Slice], num_decodes: int) -> tuple[Slice, ...]:
        """All slices of the planned step: the last tuple again if only positions changed.

        `num_decodes`: the count of leading slices that came from `plan`.
        """
        before = self._slices
        only = 0 < num_decodes == len(slices)
        if only and len(before) == len(slices) and all(map(is_, before, slices)):
            return before
        whole = tuple(slices)
        self._slices = whole if only else ()
        return whole
