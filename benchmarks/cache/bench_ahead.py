"""Claim: after the server was idle, a first long prompt does not wait for memory to be mapped.

Starts a new server for each measurement, with random weights in a 0.5 B shape. Measures the seconds
to the first token of a prompt of 2,048 tokens: sent right after a short prompt, and sent after a
pause in which the server prefaults pages (`sylvan.runtime.pool.prefault`).

    python benchmarks/cache/bench_ahead.py [--tokens 2048] [--pairs 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler

SHAPE = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text()) | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
}
REST_S = 3.0


def seconds(folder: Path, tokens: int, rest_s: float) -> float:
    """Return the seconds to the first token of a prompt, on a new server."""
    outputs: list[TokenOutput] = []
    options = {"model": str(folder), "load_format": "dummy", "log_level": "error"}
    config = gather(from_keywords({**options, "cache__max_tokens": 65536})).config
    built = build_scheduler(config, outputs.extend)

    def ask(rid: str, length: int) -> float:
        ids = np.random.default_rng(length).integers(300, 1000, length).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, sampling_seed=0)
        request = GenerateRequest(rid=rid, input_ids=ids, output_ids=EMPTY_IDS, sampling=sampling)
        began = time.perf_counter()
        built.scheduler.add(request)
        while not any(output.rid == rid and output.finish for output in outputs):
            built.scheduler.step()
        return time.perf_counter() - began

    ask("short", 64)
    time.sleep(rest_s)
    spent = ask("long", tokens)
    built.close()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        runs = [
            (seconds(folder, args.tokens, 0.0), seconds(folder, args.tokens, REST_S))
            for _ in range(args.pairs)
        ]
    at_once, rested = zip(*runs, strict=True)
    ratios = [b / a for a, b in runs]
    found = {
        "at_once_ms": round(1000 * statistics.median(at_once), 1),
        "rested_ms": round(1000 * statistics.median(rested), 1),
        "ratio": [round(f(ratios), 3) for f in (statistics.median, min, max)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
