"""Whether masks are filled beside the forward pass, or before it.

Beside it they cost nothing as long as there is a core that the pass does not use. But it is not
free: the masks cross to a thread and back, and tokens have to be drawn by a call of their own,
where a native step draws them in its own call otherwise. And where the threads of a step use all
cores, whoever fills masks takes one from them, and all of them wait for that one: little can be
gained, and only next to a pass that is much longer, since it mostly waits for memory. So what
decides is how long the last passes took and what a mask took. Masks are the same either way, and
so are tokens.
"""

from __future__ import annotations

from collections import deque

LEAST_S = 3e-4
"""What filling beside the pass costs: no less may be there to gain."""
MARGIN = 8.0
"""Where the pass uses all cores, it has to take so many times what the masks take."""
LOOK_AGAIN = 64
"""Steps; beside other work, what a mask takes cannot be told, so it is told before a pass again."""
_LAST_PASSES = 8


class Overlap:
    """Decides for each step, by measurements of earlier ones.

    On a device the pass is under way before masks are asked for: what `passed` is told is next to
    nothing then, and no thread is needed.

    Args:
        free_core: Whether there is a core that the forward pass does not use.
    """

    def __init__(self, *, free_core: bool) -> None:
        self._free_core = free_core
        self._mask_s = 0.0
        self._passes_s: deque[float] = deque(maxlen=_LAST_PASSES)
        self._unmeasured = 0  # steps

    def beside(self, num_masks: int) -> bool:
        """Whether so many masks are to be filled beside the next forward pass."""
        if not self._is_worth_it(num_masks * self._mask_s) or self._unmeasured >= LOOK_AGAIN:
            return False
        self._unmeasured += 1
        return True

    def filled(self, num_masks: int, seconds: float) -> None:
        """What masks took before a forward pass."""
        self._unmeasured = 0
        self._mask_s = (self._mask_s + seconds / num_masks) / 2

    def passed(self, seconds: float) -> None:
        """What a forward pass took."""
        self._passes_s.append(seconds)

    def _is_worth_it(self, masks_s: float) -> bool:
        pass_s = min(self._passes_s, default=0.0)
        if self._free_core:
            return min(masks_s, pass_s) >= LEAST_S
        return masks_s >= LEAST_S and pass_s >= MARGIN * masks_s
