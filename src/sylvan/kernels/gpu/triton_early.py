"""What a kernel that starts early calls before it touches the memory of others."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def inputs_ready(EARLY: tl.constexpr):
    """Let the next kernel start as soon as there is room, and wait for all kernels before this one.

    Each kernel of a chain waits for the one before it to end, which has itself waited, so that all
    earlier ones have ended, too.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
