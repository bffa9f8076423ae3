"""Claim: a schema that needs a guard costs little more than one that a grammar alone enforces.

Measures throughput and time to the first token of free text, of a schema that the grammar enforces,
and of the same schema with a guarded keyword, at several concurrencies; runs are interleaved,
numbers are medians. Tokens that are rolled back count as time, not as output. `back` is the number
of tokens rolled back per token kept.

    PYTHONPATH=. python benchmarks/grammar/bench_guards.py [--model sapling] [--batch 1 8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from sylvan.runtime.engine.engine import Engine

ITEM = {"type": "object", "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}}}
ITEM |= {"required": ["id"], "additionalProperties": False}
HELD = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "rows": {"type": "array", "items": ITEM, "minItems": 8, "maxItems": 8},
        "note": {"type": "string", "maxLength": 60},
    },
    "required": ["title", "rows", "note"],
    "additionalProperties": False,
}
ROWS = {**HELD["properties"]["rows"], "uniqueItems": True}  # type: ignore[index]
GUARDED = {**HELD, "properties": {**HELD["properties"], "rows": ROWS}}  # type: ignore[dict-item]
KINDS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "held": {"json_schema": json.dumps(HELD)},
    "guarded": {"json_schema": json.dumps(GUARDED)},
}


async def run(engine: Engine, kind: str, batch: int, tokens: int, seed: int) -> dict[str, float]:
    """Return tokens kept per second, the median time to the first token, and tokens rolled back."""
    firsts: list[float] = []
    kept = back = 0

    async def one(number: int) -> None:
        nonlocal kept, back
        sampling = {**KINDS[kind], "max_new_tokens": tokens, "temperature": 1.0}
        sampling["sampling_seed"] = 1000 * seed + number
        began, first, last = time.perf_counter(), 0.0, None
        stream: Any = await engine.async_generate(f"Request {number}: ", sampling, stream=True)
        async for reply in stream:
            first = first or time.perf_counter() - began
            last = reply
        assert last is not None
        firsts.append(first)
        kept += last["meta_info"]["completion_tokens"]
        back += last["meta_info"].get("taken_back_tokens", 0)

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(batch)))
    seconds = time.perf_counter() - began
    return {
        "rate": kept / seconds,
        "first_ms": 1000 * statistics.median(firsts),
        "back": back / kept,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    model = {"model_path": args.model, "load_format": args.load_format, "log_level": "error"}
    with Engine(**model) as engine:
        for batch in args.batch:
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for seed in range(args.rounds + 1):  # the first one compiles
                for kind in KINDS:
                    engine.flush_cache()  # so that all kinds start from the same cache
                    row = asyncio.run(run(engine, kind, batch, args.tokens, seed))
                    if seed:
                        found[kind].append(row)
            medians = {
                kind: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
                for kind, rows in found.items()
            }
            ratios = sorted(
                g["rate"] / f["rate"] for g, f in zip(found["guarded"], found["free"], strict=True)
            )
            row = {
                "batch": batch,
                **{kind: {k: round(v, 3) for k, v in m.items()} for kind, m in medians.items()},
                "guarded_over_free": round(statistics.median(ratios), 3),
                "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
                "guarded_over_held": round(medians["guarded"]["rate"] / medians["held"]["rate"], 3),
                "first_over_free": round(
                    medians["guarded"]["first_ms"] / medians["free"]["first_ms"], 3
                ),
            }
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
