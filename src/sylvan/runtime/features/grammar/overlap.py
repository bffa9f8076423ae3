"""Decides whether masks are computed during the forward pass or before it.

Computed during it, they are free as long as a core is idle. But there is overhead: the masks cross
to a thread and back, and tokens must be sampled by a separate call, which otherwise the native step
includes. If the threads of a step use all cores, the mask thread takes one of them and all others
wait for it: then there is little to gain, and only beside a much longer pass, which mostly waits
for memory. So the decision depends on the durations of the last passes and masks. Masks and tokens
are the same either way.
"""

from __future__ import annotations

from collections import deque

MIN_S = 3e-4
"""Overhead of computing masks during the pass, in seconds; less than this is no gain."""
MARGIN = 8.0
"""Factor by which a pass on all cores must exceed the mask time."""
LOOK_AGAIN = 64
"""Steps after which masks are computed before a pass again: only then is their time known."""
_LAST_PASSES = 8


class Overlap:
    """Decides for each step, from measurements of earlier steps.

    On a device the pass is already running when masks are requested: `passed` then gets almost
    zero, and no thread is used.

    Args:
        free_core: Whether a core is idle during the forward pass.
    """

    def __init__(self, *, free_core: bool) -> None:
        self._free_core = free_core
        self._mask_s = 0.0
        self._passes_s: deque[float] = deque(maxlen=_LAST_PASSES)
        self._unmeasured = 0  # steps

    def beside(self, num_masks: int) -> bool:
        """Whether to compute this many masks during the next forward pass."""
        if not self._is_worth_it(num_masks * self._mask_s) or self._unmeasured >= LOOK_AGAIN:
            return False
        self._unmeasured += 1
        return True

    def filled(self, num_masks: int, seconds: float) -> None:
        """Record the time of masks computed before a forward pass."""
        self._unmeasured = 0
        self._mask_s = (self._mask_s + seconds / num_masks) / 2

    def passed(self, seconds: float) -> None:
        """Record the time of a forward pass."""
        self._passes_s.append(seconds)

    def _is_worth_it(self, masks_s: float) -> bool:
        pass_s = min(self._passes_s, default=0.0)
        if self._free_core:
            return min(masks_s, pass_s) >= MIN_S
        return masks_s >= MIN_S and pass_s >= MARGIN * masks_s
