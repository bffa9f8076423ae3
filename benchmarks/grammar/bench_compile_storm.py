"""Latency between tokens of a plain stream, with and without a storm of new, hard grammars.

    python benchmarks/grammar/bench_compile_storm.py [MODEL] [--seconds 40] [--pairs 8]

MODEL is a directory, a built-in model, or the shape 0.5B with random weights.
Quiet and stormy stretches take turns; the interval is a bootstrap over the pairs. The ratio of the
two 99th percentiles should stay below 1.2. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time
from typing import Any

import numpy as np
from shapes import progress, served

import sylvan


def gaps(engine: Any, seconds: float) -> list[float]:
    """Seconds between the tokens of one stream."""
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        last = None
        for _ in engine.generate("hello", {"max_new_tokens": 200, "ignore_eos": True}, stream=True):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now
    return found


def storm(engine: Any, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        patterns = [{"type": "string", "pattern": f"^(a|b){{{i},99}}$"} for i in range(60)]
        keys = {f"key_{number}_{i}": pattern for i, pattern in enumerate(patterns)}
        schema = json.dumps({"type": "object", "properties": keys, "required": list(keys)})
        with contextlib.suppress(Exception):  # refused ones count as well
            engine.generate("x", {"max_new_tokens": 1, "json_schema": schema})


def stormy_gaps(engine: Any, seconds: float) -> list[float]:
    """As `gaps`, in a storm."""
    stop = threading.Event()
    thread = threading.Thread(target=storm, args=(engine, stop))
    thread.start()
    try:
        return gaps(engine, seconds)
    finally:
        stop.set()
        thread.join()


def p99(parts: list[list[float]]) -> float:
    return float(np.percentile(np.concatenate(parts), 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="sapling")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each kind")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    each_s = options.seconds / options.pairs
    pairs: list[tuple[list[float], list[float]]] = []
    with served(options.model) as model, sylvan.Engine(**model) as engine:
        engine.generate("x", {"max_new_tokens": 1, "regex": "a"})
        gaps(engine, min(2.0, each_s))
        for number in range(options.pairs):
            pairs.append((gaps(engine, each_s), stormy_gaps(engine, each_s)))
            both = ", ".join(f"{p99([part]) * 1e3:.2f} ms" for part in pairs[-1])
            progress(f"pair {number + 1} of {options.pairs}: {both}")
        stats = engine.get_server_info()["grammar"]
    rng = random.Random(0)
    ratios = []
    for _ in range(1000):
        quiet, stormy = zip(*rng.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(p99(list(stormy)) / p99(list(quiet)))
    ratios.sort()
    quiet, stormy = p99([q for q, _ in pairs]), p99([s for _, s in pairs])
    report = {
        "p99_ms": {"quiet": round(quiet * 1e3, 3), "stormy": round(stormy * 1e3, 3)},
        "ratio": round(stormy / quiet, 3),
        "interval": [round(ratios[25], 3), round(ratios[-26], 3)],
        "grammars": stats["compiled"] + stats["refused"],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
