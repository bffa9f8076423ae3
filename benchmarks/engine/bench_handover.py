"""Claim: `sylvan.Engine` generates nearly as fast as its scheduler alone.

Compares tokens per second of `Engine.generate` with those of the bare scheduler loop on an executor
of the same model, in the same process. Runs are interleaved, so that load on the machine affects
both alike. Also counts context switches per token. Small models show the difference best, because
their steps are short.

    python benchmarks/engine/bench_handover.py [--model DIR] [--tokens 256] [--pairs 9]

A 10 M checkpoint to measure with: `python benchmarks/peers/compare.py --setup --shapes 10M --peers
sylvan` leaves one in `~/.cache/sylvan-peers/models/10M`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.engine.engine import Engine

PROMPT = 32
WORKLOADS = {"1 request": (1, False), "1 stream": (1, True), "32 requests": (32, False)}

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]  # returns how many tokens came


def switches() -> int:
    """Return the number of context switches of all threads of this process so far."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        found += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found


def engine_of(options: dict[str, Any], stream: bool) -> tuple[Generate, Callable[[], None]]:
    engine = Engine(**options)

    def generate(prompts: Prompts, count: int) -> int:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        replies: Any = engine.generate(input_ids=prompts, sampling_params=params, stream=stream)
        ends = [r for r in replies if r["meta_info"]["finish_reason"] is not None]
        return sum(len(reply["output_ids"]) for reply in ends)

    return generate, engine.shutdown


def loop_of(options: dict[str, Any]) -> tuple[Generate, Callable[[], None]]:
    outputs: list[TokenOutput] = []
    built = build_scheduler(gather(from_keywords(options)).config, outputs.extend)

    def generate(prompts: Prompts, count: int) -> int:
        outputs.clear()
        sampling = SamplingParams(
            max_new_tokens=count, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        for number, prompt in enumerate(prompts):
            built.scheduler.add(
                GenerateRequest(
                    rid=str(number),
                    input_ids=np.array(prompt, np.int32),
                    output_ids=EMPTY_IDS,
                    sampling=sampling,
                )
            )
        while not built.scheduler.idle:
            built.scheduler.step()
        return sum(len(output.token_ids) for output in outputs)

    return generate, built.close


def timed(generate: Generate, prompts: Prompts, count: int) -> float:
    """Return tokens per second."""
    start = time.perf_counter()
    found = generate(prompts, count)
    spent = time.perf_counter() - start
    if found != count * len(prompts):
        raise ValueError(f"{found} tokens instead of {len(prompts)} times {count}")
    return found / spent


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    batch, stream = WORKLOADS[name]
    options = {"model": args.model, "cache__prefix": "none", "log_level": "warning"}
    if args.threads:
        options["threads"] = args.threads
    engine, end_engine = engine_of(options, stream)
    loop, end_loop = loop_of(options)
    rng = np.random.default_rng(0)
    prompts: Prompts = rng.integers(300, 1000, (batch, PROMPT)).tolist()
    for generate in (engine, loop):
        timed(generate, prompts, 8)
    whole: list[float] = []
    alone: list[float] = []
    left: list[float] = []
    left_alone: list[float] = []
    for _ in range(args.pairs):
        for generate, rates, switched in ((engine, whole, left), (loop, alone, left_alone)):
            before = switches()
            rates.append(timed(generate, prompts, args.tokens))
            switched.append((switches() - before) / (batch * args.tokens))
    end_engine()
    end_loop()
    ratios = sorted(w / a for w, a in zip(whole, alone, strict=True))
    return {
        "workload": name,
        "engine_tokens_s": round(statistics.median(whole), 1),
        "loop_tokens_s": round(statistics.median(alone), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "engine_switches_a_token": round(statistics.median(left), 3),
        "loop_switches_a_token": round(statistics.median(left_alone), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--threads", type=int, help="default: the engine's choice")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    args = parser.parse_args()
    for name in args.workloads:
        print(json.dumps(measure(name, args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
