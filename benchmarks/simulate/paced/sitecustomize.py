"""Paces the steps of a scheduler process; Python runs it at start-up if this folder is on its path.

The server is the real one, with all its processes; only its steps take as long as those of a device
of known speed, whatever else runs on this machine. See `bench_accuracy.py`.
"""

from __future__ import annotations

import random
import sys
import time

FLOOR_S, ROW_S, CONTEXT_S, SAMPLE_S = 6e-3, 9e-5, 4e-7, 2e-5
SCATTER = 0.06


def seconds(rows: int, context: int, samples: int) -> float:
    """Return the time of a step: memory-bound up to some rows, then compute-bound; decodes also
    read their KV.
    """
    return max(FLOOR_S, ROW_S * rows) + CONTEXT_S * context + SAMPLE_S * samples


def pace() -> None:
    """Make steps of this process take that time."""
    from sylvan.runtime.executor.worker import StepWorker

    launch, rng = StepWorker.launch, random.Random(1)

    def paced(self, plan):
        began_s = time.perf_counter()
        step = launch(self, plan)
        if plan.num_slices:
            lens = plan.stops - plan.starts
            context = int(plan.stops[lens == 1].sum())
            wanted_s = seconds(plan.num_tokens, context, plan.num_samples)
            wanted_s *= rng.lognormvariate(0.0, SCATTER)
            time.sleep(max(0.0, began_s + wanted_s - time.perf_counter()))
        return step

    StepWorker.launch = paced


if any("scheduler_process" in word for word in sys.orig_argv):
    pace()
