"""Out of device memory in a step: roll the step back and continue with smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sylvan.runtime.core.req import Batch, Req

RECOVER_STEPS = 64


class StepSize:
    """Tokens that a step may have.

    Halved when a step did not fit, and doubled again after `RECOVER_STEPS` steps that did. Where
    it is `fixed`, because prompts are never split, a step that does not fit fails.
    """

    def __init__(self, most: int, *, fixed: bool) -> None:
        self.tokens = most
        self._most, self._fixed = most, fixed
        self._steps = 0

    def shrink(self, failed: Batch) -> bool:
        """Lower the limits below the failed step; return False, changing nothing, if impossible."""
        whole = self._fixed or any(piece.whole for piece in failed.slices)
        if whole or failed.num_tokens < 2:
            return False
        self.tokens, self._steps = failed.num_tokens // 2, 0
        return True

    def skip(self, steps: int) -> None:
        """Count `steps` steps that fitted."""
        for _ in range(steps):
            if self.tokens == self._most:
                return
            self.on_step()

    def on_step(self) -> None:
        """A step fitted."""
        if self.tokens == self._most:
            return
        self._steps += 1
        if self._steps >= RECOVER_STEPS:
            self.tokens, self._steps = min(self._most, 2 * self.tokens), 0


def take_back(failed: Batch, later: Iterable[Batch], retract: Callable[[Req], None]) -> list[str]:
    """Undo a step that did not run, and what steps launched after it make of its tokens.

    Returns the rids of requests that start anew, which the executor is to forget.
    """
    reqs = {piece.req.rid: piece.req for piece in failed.slices}
    for piece in failed.slices:
        piece.req.pending -= piece.samples
    for batch in later:
        for piece in batch.slices:
            if piece.samples and piece.req.rid in reqs:
                piece.samples = False
                piece.req.pending -= 1
    restarted: list[str] = []
    for req in reqs.values():
        if req.finish is None and req.kv is not None:
            req.computed = 0  # its KV is invalid: share nothing
            retract(req)
            restarted.append(req.rid)
    return restarted
