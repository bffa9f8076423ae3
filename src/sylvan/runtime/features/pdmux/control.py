"""Control half: long prompts load, while the worker half computes them between steps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.cache.types import common_prefix_len
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.features.pdmux.work import (
    Advance,
    Fill,
    Filled,
    MuxEvents,
    MuxWork,
    Stop,
)
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict

logger = logging.getLogger(__name__)

MAX_JOBS = 4
"""Prompts with memory; further ones wait without."""


@dataclass(slots=True, eq=False)
class _InterleavedPrompt:
    number: int
    req: Req
    stopping: bool = False


class PrefillBetween(Capability):
    """Multiplexes prefill with decoding.

    A long prompt that arrives while others decode gets its memory and loads, like one whose KV is
    transferred: the worker half computes all its tokens except the last, some ops after each
    step. A normal step computes the last token, and samples the first output.

    Args:
        min_tokens: Shorter prompts are computed in normal steps.
        page_size: Tokens per page.
        may_transfer: Whether KV of requests with a room is transferred from another server.
    """

    name: ClassVar = "pdmux"
    work_type: ClassVar = MuxWork
    report_type: ClassVar = MuxEvents

    def __init__(self, min_tokens: int, page_size: int, *, may_transfer: bool = False) -> None:
        self._min_tokens, self._page_size, self._may_transfer = min_tokens, page_size, may_transfer
        self._port: SchedulerPort | None = None
        self._numbers = itertools.count(1)
        self._chosen: set[str] = set()
        self._by_rid: dict[str, _InterleavedPrompt] = {}
        self._by_number: dict[int, _InterleavedPrompt] = {}
        self._outbox: list[Fill | Stop] = []

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def wants_step(self) -> bool:
        """Prompts continue even when no request decodes."""
        return bool(self._by_number)

    def plan_work(self, batch: Batch) -> MuxWork | None:
        if not self._by_number:
            return None
        work, self._outbox = tuple(self._outbox), []
        return work or (Advance(),)

    def on_result(self, batch: Batch, report: Any) -> None:
        assert self._port is not None
        for event in report or ():
            job = self._by_number.pop(event.job, None)
            if job is None:
                continue
            rid = job.req.rid
            self._by_rid.pop(rid, None)
            if job.req.finish is not None:
                self._port.release(rid)
            elif isinstance(event, Filled):
                self._port.loaded(rid, job.req.prompt_len - 1)
            else:
                logger.warning("prompt of %s is computed in steps: %s", rid, event.error)
                self._port.load_failed(rid)

    # ---- requests

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        self._chosen.discard(req.rid)
        decodes = any(other.computed >= other.prompt_len for other in admitted)
        if not self._is_eligible(req) or not (decodes or self._by_number):
            return Verdict.READY
        if len(self._by_number) >= MAX_JOBS or self._shares_a_start(req):
            return Verdict.WAIT
        self._chosen.add(req.rid)
        return Verdict.LOAD

    def on_load(self, req: Req) -> None:
        if req.rid not in self._chosen:
            return
        self._chosen.discard(req.rid)
        if req.kv is None or req.kv.loading is not None:
            return  # a tier loads its start; normal steps compute the rest
        job = _InterleavedPrompt(next(self._numbers), req)
        self._by_rid[req.rid] = self._by_number[job.number] = job
        start, stop = req.kv.cached, req.prompt_len - 1
        ids = req.tokens.view(start, max(start, stop)).copy()
        pages = req.kv.pages[: -(-stop // self._page_size)].copy()
        self._outbox.append(Fill(job.number, start, ids, pages))

    def stop_loading(self, req: Req) -> bool:
        """Never stop: computing takes as long as it takes."""
        return req.rid not in self._by_rid

    def on_finish(self, req: Req) -> None:
        self._chosen.discard(req.rid)
        job = self._by_rid.get(req.rid)
        if job is not None and not job.stopping:
            job.stopping = True
            self._outbox.append(Stop(job.number))

    def holds(self, req: Req) -> bool:
        """Keep the pages while they may be written."""
        return req.rid in self._by_rid

    # ---- inside

    def _is_eligible(self, req: Req) -> bool:
        """Whether the request needs only the KV of its prompt."""
        request = req.request
        if not isinstance(request, GenerateRequest) or req.retractions or not req.may_load:
            return False
        if req.prompt_len < self._min_tokens or len(req.tokens) != req.prompt_len:
            return False
        logprobs = request.logprobs
        plain = (
            request.lora is None
            and not request.media
            and (logprobs is None or logprobs.start is None)
        )
        room = request.bootstrap
        with_room = self._may_transfer and room is not None and room.role != "prefill"
        return plain and not with_room

    def _shares_a_start(self, req: Req) -> bool:
        """Whether a prompt in progress will cache a prefix of this one."""
        mine = req.request.input_ids
        least = max(self._page_size, self._min_tokens)
        return any(
            common_prefix_len(mine, job.req.request.input_ids) >= least
            for job in self._by_number.values()
        )
