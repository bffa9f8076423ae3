"""Compares tokens per second of requests with a JSON schema and without; runs are paired and
interleaved.

    python benchmarks/grammar/bench_throughput.py [MODEL] [--batch 1 32] [--repeats 7]
        [--backend llguidance] [--overlap auto on off] [--what masks jumps]

MODEL is a directory, a built-in model, or the shape 0.5B with random weights.

Ratios are per pair of runs; the interval is a bootstrap of their median. `masks` is without
jump-forward and should stay above 0.95; `jumps` on long keys should stay above 1.3. The batch is
always full, and no output ends before its last token, so that both sides compute full batches.
`passes_per_token` counts forward passes of the requests with a schema, each in its own place of the
batch: it shows the savings by jump-forward. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from typing import Any

from shapes import progress, served

import sylvan

KEYS = [f"the_description_of_property_number_{i}_in_full" for i in range(16)]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {key: {"type": "string", "maxLength": 12} for key in KEYS},
        "required": KEYS,
        "additionalProperties": False,
    }
)
NEW_TOKENS = 128
KINDS = ("masks", "jumps")


class Rates:
    """Measures completion tokens per second, and forward passes of constrained requests."""

    def __init__(self, engine: Any, batch: int, tokens: int, rounds: int) -> None:
        self._engine, self._batch, self._tokens = engine, batch, tokens
        self._count = batch * rounds
        self.passes, self.written = 0, 0.0

    def measure(self, seed: int, *, bound: bool) -> float:
        params: dict[str, Any] = {"max_new_tokens": self._tokens, "ignore_eos": True}
        if bound:
            params["json_schema"] = SCHEMA
        each = [params | {"sampling_seed": 1000 * seed + i} for i in range(self._count)]
        prompts = [f"{seed} {i}: answer in JSON" for i in range(self._count)]
        before = self._steps()
        start = time.perf_counter()
        replies = self._engine.generate(prompts, each)
        seconds = time.perf_counter() - start
        written = sum(r["meta_info"]["completion_tokens"] for r in replies)
        if bound:
            self.passes += self._steps() - before
            self.written += written / self._batch
        return written / seconds

    def _steps(self) -> int:
        return self._engine.get_server_info()["load"]["steps"]


def interval(ratios: list[float]) -> list[float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [round(medians[50], 3), round(medians[-51], 3)]


def compare(engine: Any, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    rates = Rates(engine, batch, options.tokens, options.rounds)
    rates.measure(99, bound=True)
    ratios = []
    for seed in range(options.repeats):
        order = (seed % 2 == 0, seed % 2 == 1)
        pair = {bound: rates.measure(seed, bound=bound) for bound in order}
        ratios.append(pair[True] / pair[False])
        progress(f"batch {batch}, pair {seed + 1} of {options.repeats}: {ratios[-1]:.3f}")
    return {
        "batch": batch,
        "ratio": round(statistics.median(ratios), 3),
        "interval": interval(ratios),
        "passes_per_token": round(rates.passes / rates.written, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="sapling")
    parser.add_argument("--what", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3, help="requests per place in the batch")
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--overlap", choices=["auto", "on", "off"], nargs="+", default=["auto"])
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS)
    options = parser.parse_args()
    runs = itertools.product(options.overlap, options.what, options.batch)
    with served(options.model) as model:
        for overlap, kind, batch in runs:
            settings = model | {
                "grammar.jump_forward": kind == "jumps",
                "grammar.backend": options.backend,
                "scheduler.overlap": overlap,
                "scheduler.max_running_reqs": batch,
            }
            what = {"what": kind, "overlap": overlap}
            progress(f"{what}, batch {batch}")
            with sylvan.Engine(**settings) as engine:
                print(json.dumps(what | compare(engine, options, batch)), flush=True)


if __name__ == "__main__":
    main()
