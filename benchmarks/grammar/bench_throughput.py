"""Tokens per second of requests with a JSON schema over the same without: paired, interleaved.

    python benchmarks/grammar/bench_throughput.py MODEL_DIR [--batch 1 32] [--repeats 7]

Ratios are by pair of runs; the interval is a bootstrap of their median. `masks` is without jumps
and should stay above 0.95; `jumps` on long keys above 1.3. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import sylvan

KEYS = [f"the_description_of_property_number_{i}_in_full" for i in range(6)]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {key: {"type": "string", "maxLength": 12} for key in KEYS},
        "required": KEYS,
        "additionalProperties": False,
    }
)
NEW_TOKENS = 128


def rate(engine: Any, batch: int, *, bound: bool, seed: int) -> float:
    """Completion tokens per second."""
    params: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    if bound:
        params["json_schema"] = SCHEMA
    each = [params | {"sampling_seed": 1000 * seed + i} for i in range(batch)]
    start = time.perf_counter()
    replies = engine.generate([f"{seed} {i}: answer in JSON" for i in range(batch)], each)
    seconds = time.perf_counter() - start
    return sum(r["meta_info"]["completion_tokens"] for r in replies) / seconds


def interval(ratios: list[float]) -> list[float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [round(medians[50], 3), round(medians[-51], 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for jumps in (False, True):
        with sylvan.Engine(model_path=options.model, **{"grammar.jump_forward": jumps}) as engine:
            for batch in options.batch:
                rate(engine, batch, bound=True, seed=99)
                ratios = []
                for seed in range(options.repeats):
                    order = (seed % 2 == 0, seed % 2 == 1)
                    pair = [(b, rate(engine, batch, bound=b, seed=seed)) for b in order]
                    rates = dict(pair)
                    ratios.append(rates[True] / rates[False])
                print(
                    json.dumps(
                        {
                            "what": "jumps" if jumps else "masks",
                            "batch": batch,
                            "ratio": round(statistics.median(ratios), 3),
                            "interval": interval(ratios),
                        }
                    )
                )


if __name__ == "__main__":
    main()
