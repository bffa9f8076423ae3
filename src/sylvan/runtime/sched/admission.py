"""Admission and preemption, by the memory that running requests will probably need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.core.req import Req, Slice

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
CLIP_NEW_TOKENS = 4096
RETRACT_STEPS = 20  # outputs per request that must fit after a retraction
START_COST = 12  # decode slices that cost the scheduler as much time as starting a request
LIGHT_STEP = 400  # decode slices that take the scheduler about 2 ms
MIN_STARTS = 12

_priority = attrgetter("priority")


def max_starts(num_others: int) -> int:
    """Most requests to start in a step that also decodes; the rest start in later steps."""
    return max(MIN_STARTS, (LIGHT_STEP - num_others) // START_COST)


class Admission:
    """Adaptive estimate of future outputs (the new-token ratio of SGLang's scheduler).

    Each running request is expected to generate `ratio` of its remaining token limit. The ratio
    starts high, falls with every step that had enough memory, and rises when requests had to be
    retracted.
    """

    def __init__(self, conservativeness: float) -> None:
        self._init = min(INIT_RATIO * conservativeness, 1.0)
        self._min = min(self._init * MIN_RATIO_FACTOR, 1.0)
        self._decay = (self._init - self._min) / DECAY_STEPS
        self.ratio = self._init

    def reserved_tokens(self, running: Iterable[Req]) -> float:
        """Tokens that `running` will probably need beyond the memory they hold."""
        total, ratio = 0.0, self.ratio
        for req in running:  # `expected_outputs`, inlined for speed
            left = req.max_tokens - req.tokens.length
            if left > 0:
                likely = left if left < CLIP_NEW_TOKENS else CLIP_NEW_TOKENS
                total += likely if req.ignores_eos else likely * ratio
        return total

    def expected_outputs(self, req: Req) -> float:
        """Tokens that `req` is expected to generate from now on."""
        request = req.request
        if not isinstance(request, GenerateRequest):
            return 0.0
        left = (request.sampling.max_new_tokens or 0) - req.num_outputs
        ratio = 1.0 if req.ignores_eos else self.ratio
        return min(max(left, 0), CLIP_NEW_TOKENS) * ratio

    def on_step(self) -> None:
        """Lower the estimate: a step had enough memory."""
        self.ratio = max(self._min, self.ratio - self._decay)

    def skip(self, steps: int) -> None:
        """Count `steps` steps that had enough memory."""
        ratio, least, decay = self.ratio, self._min, self._decay
        while steps and ratio > least:  # one by one, to round as `on_step` does
            ratio, steps = ratio - decay, steps - 1
        self.ratio = max(least, ratio)

    def on_idle(self) -> None:
        """Reset the estimate when nothing runs."""
        self.ratio = self._init

    def on_retract(self, running: Iterable[Req]) -> None:
        """Raise the estimate to what the running requests actually needed: memory ran out."""
        done = limit = 0
        for req in running:
            if isinstance(req.request, GenerateRequest):
                done += req.num_outputs + RETRACT_STEPS
                limit += min(req.request.sampling.max_new_tokens or 0, CLIP_NEW_TOKENS)
        self.ratio = max(self.ratio, min(1.0, done / (limit + 1)))


def refuse_oversized(
    request: GenerateRequest | EmbedRequest, cache: KVMemory, *, whole_prompts: bool
) -> None:
    """Check that a request can ever fit into KV memory.

    Args:
        request: The request.
        cache: KV memory.
        whole_prompts: Embedding requests compute their whole prompt in one step.

    Raises:
        RequestError: it can never fit.
    """
    new, field, room = 0, "input_ids", cache.total_tokens
    if whole_prompts and isinstance(request, EmbedRequest):
        room = cache.max_step_tokens
    if isinstance(request, GenerateRequest):
        new = request.sampling.max_new_tokens or 0
        field = "max_new_tokens" if new else field
    need = len(request.input_ids) + new
    if need > room:
        raise RequestError(
            f"{len(request.input_ids)} prompt tokens and up to {new} new ones need {need}"
            f" tokens of KV memory; {room} would fit",
            param=field,
        )


class Preemption:
    """Chooses victims among requests without a slice in the step being planned.

    Args:
        running: The live list of running requests.
        threshold: Minimum priority difference for preemption; None disables it.
    """

    def __init__(self, running: Sequence[Req], threshold: int | None) -> None:
        self._running, self._threshold = running, threshold

    def victim(self, slices: Iterable[Slice], rank: int) -> Req:
        """Victim if memory ran out: least urgent, then fewest outputs, longest prompt, newest.

        Args:
            slices: Of the step being planned.
            rank: Whose memory ran out; see `KVHandle.rank`.
        """
        free = [r for r in self._without(slices) if r.kv is not None and r.kv.rank == rank]
        return min(free, key=lambda r: (r.priority, r.num_outputs, -r.prompt_len, -r.order))

    def is_possible(self, priority: int) -> bool:
        """Whether a request of that priority may preempt any running one."""
        if self._threshold is None or not self._running:
            return False
        return priority - min(map(_priority, self._running)) >= self._threshold

    def victim_of(self, urgent: Req, slices: Iterable[Slice]) -> Req | None:
        """Return the least urgent, newest request that `urgent` may preempt, or None."""
        threshold = self._threshold
        if threshold is None:
            return None
        less = [r for r in self._without(slices) if urgent.priority - r.priority >= threshold]
        return min(less, key=lambda r: (r.priority, -r.order), default=None)

    def _without(self, slices: Iterable[Slice]) -> list[Req]:
        busy = {piece.req.order for piece in slices}
        return [req for req in self._running if req.order not in busy]
