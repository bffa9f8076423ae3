"""Claim: the engine adds little to the bare forward pass.

Compares a decode step of the engine (schedule, prepare, forward, sample, process results) with the
forward pass alone, for 1, 8 and 32 requests of the built-in model. The forward pass alone writes
whole rows of logits, which a step of greedy requests does not.

    python benchmarks/engine/bench_step_overhead.py [--model DIR] [--overlap on|off]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import numpy as np

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler

CONTEXT, STEPS = 256, 200


def bare(worker, repeats: int) -> list[float]:
    """Return the seconds of the forward pass alone: the last step again, without anything around
    it.
    """
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        worker._backend._runner.run(worker._backend.batch)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(model: str, overlap: str, batch: int) -> dict[str, float]:
    keywords = {"model": model, "overlap": overlap, "log_level": "warning"}
    built = build_scheduler(gather(from_keywords(keywords)).config, lambda outputs: None)
    rng = np.random.default_rng(0)
    for number in range(batch):
        built.scheduler.add(
            GenerateRequest(
                rid=str(number),
                input_ids=rng.integers(0, 1000, CONTEXT, np.int32),
                output_ids=EMPTY_IDS,
                sampling=SamplingParams(
                    max_new_tokens=STEPS + 60, temperature=0.0, ignore_eos=True, sampling_seed=0
                ),
            )
        )
    for _ in range(40):
        built.scheduler.step()
    whole: list[float] = []
    alone: list[float] = []
    worker = built.scheduler._parts.executor._worker
    for number in range(STEPS):
        start = time.perf_counter()
        built.scheduler.step()
        whole.append(time.perf_counter() - start)
        if (
            overlap != "on" and number % 4 == 3
        ):  # interleaved, so that load on the machine affects both alike
            alone += bare(worker, 1)
    built.scheduler.pause("abort")
    forward, step = statistics.median(alone or bare(worker, STEPS)), statistics.median(whole)
    built.close()
    return {
        "batch": batch,
        "forward_us": round(forward * 1e6, 1),
        "step_us": round(step * 1e6, 1),
        "added_us": round((step - forward) * 1e6, 1),
        "ratio": round(step / forward, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--overlap", default="auto")
    args = parser.parse_args()
    for batch in (1, 8, 32):
        runs = [measure(args.model, args.overlap, batch) for _ in range(3)]
        runs.sort(key=lambda r: r["ratio"])
        spread = [runs[0]["ratio"], runs[-1]["ratio"]]
        print(json.dumps(runs[1] | {"ratio_spread": spread, "overlap": args.overlap}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
