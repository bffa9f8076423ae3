"""Latency between tokens of a plain stream, with and without a storm of new, hard grammars.

    python benchmarks/grammar/bench_compile_storm.py MODEL_DIR [--seconds 20]

The ratio of the two 99th percentiles should stay below 1.2. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from typing import Any

import numpy as np

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with sylvan.Engine(model_path=options.model) as engine:
        engine.generate("x", {"max_new_tokens": 1, "regex": "a"})
        gaps(engine, 2.0)
        quiet = gaps(engine, options.seconds)
        stop = threading.Event()
        thread = threading.Thread(target=storm, args=(engine, stop))
        thread.start()
        stormy = gaps(engine, options.seconds)
        stop.set()
        thread.join()
        stats = engine.get_server_info()["grammar"]
    p99 = [float(np.percentile(x, 99)) * 1e3 for x in (quiet, stormy)]
    print(
        json.dumps(
            {
                "p99_ms": [round(x, 3) for x in p99],
                "ratio": round(p99[1] / p99[0], 3),
                "grammars": stats["compiled"] + stats["refused"],
            }
        )
    )


if __name__ == "__main__":
    main()
