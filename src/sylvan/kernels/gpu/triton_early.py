"""Synchronises a kernel that was launched early with the kernels before it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def inputs_ready(EARLY: tl.constexpr):
    """Let the next kernel start as soon as there is room, and wait for all kernels before this one.

    Waiting for the previous kernel suffices, because that one has waited for its predecessor.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
