"""Control half: generates a block per step; its masked positions are drafts that the step fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Draft, Req
from sylvan.runtime.core.step import chain
from sylvan.runtime.features.diffusion.work import FillSlice, FillWork
from sylvan.runtime.sched.capability import Capability, Verdict


class Diffusion(Capability):
    """Plans blocks: prompts in whole blocks, and masked positions after the newest token.

    A token sees its own block, so its KV is final once the block is complete. The newest token of
    a request is therefore computed together with the rest of its block, in the step that fills the
    positions after it.

    A model that sees the whole text computes all of it in each step, with the masked positions of
    all later blocks; the KV of one step is of no use to the next.

    Args:
        block: Tokens of a block.
        mask_id: Id of the mask token.
        context_len: Most tokens of a request.
        whole: Most tokens of a forward pass, if the model sees the whole text; else None.
    """

    name: ClassVar = "diffusion"
    fills: ClassVar = True
    work_type: ClassVar = FillWork

    def __init__(
        self, block: int, mask_id: int, context_len: int, whole: int | None = None
    ) -> None:
        self._block, self._mask_id = block, mask_id
        self._context_len, self._whole = context_len, whole
        self._final: dict[str, tuple[int, int]] = {}  # tokens with final KV, and retractions so far

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        """Reject parameters that assume left-to-right generation."""
        request = req.request
        if not isinstance(request, GenerateRequest):
            raise RequestError("this model makes no vectors.", param="input")
        sampling, logprobs = request.sampling, request.logprobs
        refused = {
            "grammar": sampling.grammar is not None,
            "max_thinking_tokens": request.thinking is not None,
            "frequency_penalty": bool(sampling.frequency_penalty),
            "presence_penalty": bool(sampling.presence_penalty),
            "repetition_penalty": sampling.repetition_penalty != 1.0,
            "logprob_start_len": logprobs is not None and logprobs.start is not None,
            "lora_path": request.lora is not None,
        }
        for param, is_given in refused.items():
            if is_given:
                message = (
                    f"{param}: this model fills blocks by diffusion, which has no such option."
                )
                raise RequestError(message, param=param)
        total = min(req.max_tokens, self._context_len)
        if self._whole is not None and total > self._whole:
            message = (
                "max_tokens: this model sees the whole text in each pass, so prompt and answer are "
                f"at most {self._whole} tokens (scheduler.max_batch_tokens); these are {total}."
            )
            raise RequestError(message, param="max_tokens")
        return Verdict.READY

    def cut(self, req: Req, size: int, limit: int) -> int:
        """Plan whole blocks; leave the last token to the step that fills the positions after it."""
        if req.lacking == 1:
            return size
        if self._whole is not None:
            return min(size, req.lacking - 1)
        stop, last = req.computed + size, req.num_tokens - 1
        if stop >= last:
            return last - req.computed
        stop = stop // self._block * self._block
        if stop <= req.computed:  # no whole block fits: take one, or wait for a step with more room
            stop = min((req.computed // self._block + 1) * self._block, last)
        return stop - req.computed if stop - req.computed <= limit else 0

    def draft(self, req: Req, limit: int) -> Draft | None:
        """Return masked positions up to the end of the newest token's block."""
        known = req.tokens.length
        if self._whole is not None:
            end = min(req.max_tokens, self._context_len)
        else:
            end = min((known // self._block + 1) * self._block, self._context_len)
        if not 0 < end - known <= limit:
            return None
        return Draft((self._mask_id,) * (end - known), chain(end - known))

    def plan_work(self, batch: Batch) -> FillWork | None:
        """Return the tokens before the newest one that are computed again."""
        found: list[FillSlice] = []
        for index, piece in enumerate(batch.slices):
            req = piece.req
            if piece.draft is None:
                continue
            if self._whole is not None:
                head = np.array(req.tokens.view(0, piece.start), np.int32)
                done = (piece.stop - req.prompt_len) % self._block
                fills = min(self._block - done, len(piece.draft.tokens))
                found.append(FillSlice(index, head, fills))
                continue
            start = (piece.stop - 1) // self._block * self._block
            if self._final.get(req.rid) == (piece.stop, req.retractions):
                start = piece.start
            head = np.array(req.tokens.view(start, piece.start), np.int32)
            found.append(FillSlice(index, head))
            self._final[req.rid] = (piece.stop + len(piece.draft.tokens), req.retractions)
        return FillWork(slices=tuple(found)) if batch.slices else None

    def on_finish(self, req: Req) -> None:
        """Forget a finished request."""
        self._final.pop(req.rid, None)
