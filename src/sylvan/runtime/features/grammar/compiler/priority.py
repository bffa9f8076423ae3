"""Compiling makes way for decoding: its processes and threads come after everything else."""

from __future__ import annotations

import os
import sys
import threading

NICENESS = 10
IDLE_LANE = sys.platform == "linux"
"""Whether `wait_for_idle_cores` does anything."""


def step_back() -> None:
    """This process comes later than others."""
    os.nice(max(0, NICENESS - os.nice(0)))


def thread_steps_back() -> None:
    """This thread comes later than others, where threads have priorities of their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(before, NICENESS))


def wait_for_idle_cores() -> None:
    """The calling thread runs only while a core has nothing else to do, where there is such.

    On a machine that is never idle it does not run at all, so somebody must look after it.
    """
    if sys.platform == "linux":  # as `IDLE_LANE`, for type checkers
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
