"""Measures the latency between tokens of a stream under a storm of new, expensive grammars.

    python benchmarks/grammar/bench_compile_storm.py [MODEL] [--seconds 40] [--rounds 8] \\
        [--backend llguidance|xgrammar|outlines_core|combined]

MODEL is a directory, a built-in model, or the shape 0.5B with random weights.

Three kinds of intervals alternate: quiet; stormy, with one new grammar after another; and busy,
with requests without a grammar at the rate of the storm, which shows the cost of any request to the
stream. Reports ratios of 99th percentiles, stormy to quiet (should stay below 1.2) and stormy to
busy: medians of the rounds with bootstrap intervals, so that a disturbed minute affects one round
only, and of all gaps together (`pooled`). Client, API and scheduler are one process here, on all
cores. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from shapes import progress, served

import sylvan

Round = dict[str, list[float]]
"""Seconds between tokens, by kind of stretch."""


def gaps(engine: Any, seconds: float) -> list[float]:
    """Return the seconds between the tokens of one stream."""
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


def new_grammar(number: int) -> dict[str, Any]:
    patterns = [{"type": "string", "pattern": f"^(a|b){{{i},99}}$"} for i in range(60)]
    keys = {f"key_{number}_{i}": pattern for i, pattern in enumerate(patterns)}
    schema = json.dumps({"type": "object", "properties": keys, "required": list(keys)})
    return {"max_new_tokens": 1, "json_schema": schema}


class Beside:
    """Sends requests one after the other from a thread of its own, at most one per `pause_s`."""

    def __init__(self, engine: Any, sampling: Callable[[int], dict[str, Any]]) -> None:
        self._engine, self._sampling = engine, sampling
        self.sent = 0

    def gaps(self, seconds: float, pause_s: float = 0.0) -> list[float]:
        """As `gaps`, while these requests run."""
        stop = threading.Event()
        thread = threading.Thread(target=self._send, args=(stop, pause_s))
        thread.start()
        try:
            return gaps(self._engine, seconds)
        finally:
            stop.set()
            thread.join()

    def _send(self, stop: threading.Event, pause_s: float) -> None:
        due = time.perf_counter()
        while not stop.wait(max(0.0, due - time.perf_counter())):
            due += pause_s
            self.sent += 1
            with contextlib.suppress(Exception):  # refused ones count as well
                self._engine.generate("x", self._sampling(self.sent))


def p99(parts: list[list[float]]) -> float:
    return float(np.percentile(np.concatenate(parts), 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="sapling")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="seconds of each kind of interval"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--backend", default="auto", help="grammar.backend of the engine")
    options = parser.parse_args()
    each_s = options.seconds / options.rounds
    rounds: list[Round] = []
    backend = {"grammar_backend": options.backend}
    with served(options.model) as model, sylvan.Engine(**model, **backend) as engine:
        engine.generate("x", {"max_new_tokens": 1, "regex": "a"})
        gaps(engine, min(2.0, each_s))
        storm = Beside(engine, new_grammar)
        plain = Beside(engine, lambda number: {"max_new_tokens": 1})
        for number in range(options.rounds):
            before = storm.sent
            found = {"quiet": gaps(engine, each_s), "stormy": storm.gaps(each_s)}
            found["busy"] = plain.gaps(each_s, each_s / (storm.sent - before))
            rounds.append(found)
            each = ", ".join(f"{kind} {p99([part]) * 1e3:.2f} ms" for kind, part in found.items())
            progress(f"round {number + 1} of {options.rounds}: {each}")
        stats = engine.get_server_info()["grammar"]
    report = {
        "backend": options.backend,
        "p99_ms": {kind: round(p99([r[kind] for r in rounds]) * 1e3, 3) for kind in rounds[0]},
        "stormy_over_quiet": ratio(rounds, "quiet"),
        "stormy_over_busy": ratio(rounds, "busy"),
        "requests": {"stormy": storm.sent, "busy": plain.sent},
        "grammars": stats["compiled"] + stats["refused"],
    }
    print(json.dumps(report))


def ratio(rounds: list[Round], base: str) -> dict[str, Any]:
    """Return the ratio of 99th percentiles, stormy to others, with a 95 % interval."""
    found = [p99([r["stormy"]]) / p99([r[base]]) for r in rounds]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(found, k=len(found))) for _ in range(1000))
    pooled = p99([r["stormy"] for r in rounds]) / p99([r[base] for r in rounds])
    return {
        "ratio": round(statistics.median(found), 3),
        "interval": [round(medians[25], 3), round(medians[-26], 3)],
        "pooled": round(pooled, 3),
    }


if __name__ == "__main__":
    main()
