"""Claim: long prompts on another server do not delay decoding requests.

Some requests decode while long prompts arrive one after another: first on one server that uses all
cores for both, then on a prefill and a decode server that share the same cores. Goal: the 99th
percentile of the gaps between tokens is at most 0.6 of the single server's. Also reported, as the
cost: tokens per second of the decoding requests, seconds until a prompt has its first token, and
(`second_token_ms`) the time from a prompt's first token to its second without other load.

    python benchmarks/disagg/bench_mixed.py [--decodes 4] [--prompts 4] [--tokens 1024] [--pairs 1]

Weights are random, of a 0.5 B shape; `--model` names a directory instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
from checkpoints import write_checkpoint

CODE = "import sys; from sylvan.cli import main; sys.exit(main())"
READY = re.compile(r"Sylvan (?:serves|routes) .* at (http://\S+)")


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """Start one server, or several behind a gateway; yield the address."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "serve", *words, "--port", "0", "--until-eof"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        for line in process.stdout:
            if found := READY.search(line):
                yield found[1]
                break
        else:
            raise SystemExit(f"it did not start: {' '.join(words)}")
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def body(ids: list[int], new: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "stream": True}


def times(url: str, ids: list[int], new: int, stop: threading.Event | None = None) -> list[float]:
    """Return when each event of an answer arrived."""
    found: list[float] = []
    with (
        httpx.Client(timeout=300) as client,
        client.stream("POST", url + "/generate", json=body(ids, new)) as reply,
    ):
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found.append(time.perf_counter())
            if stop is not None and stop.is_set():
                break
    return found


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(300, 1000, length).tolist()


def measure(url: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    times(url, prompt(rng, 64), 4)  # warm
    quiet = [times(url, prompt(rng, args.tokens), 2) for _ in range(2)]
    done, results = threading.Event(), []

    def decode(ids: list[int]) -> None:
        results.append(times(url, ids, 2000, done))

    threads = [
        threading.Thread(target=decode, args=(prompt(rng, 32),)) for _ in range(args.decodes)
    ]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    began = time.perf_counter()
    firsts: list[float] = []
    for _ in range(args.prompts):
        start = time.perf_counter()
        firsts.append(times(url, prompt(rng, args.tokens), 1)[0] - start)
    ended = time.perf_counter()
    done.set()
    for thread in threads:
        thread.join()
    gaps: list[float] = []
    for arrivals in results:
        inside = [at for at in arrivals if began <= at <= ended]
        gaps += np.diff(inside).tolist()
    return {
        "p50_ms": 1000 * statistics.median(gaps),
        "p99_ms": 1000 * float(np.quantile(gaps, 0.99)),
        "decoded_per_s": len(gaps) / (ended - began),
        "prompt_s": statistics.median(firsts),
        # 0 where both came in one event
        "second_token_ms": 1000 * statistics.median(a[1] - a[0] if a[1:] else 0.0 for a in quiet),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--decodes", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=1)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    half = str(max(1, cores // 2))
    with tempfile.TemporaryDirectory() as name:
        model = args.model
        if model is None:
            model = str(Path(name) / "model")
            write_checkpoint("0.5B", Path(model))
        common = (model, "--max-total-tokens", "16384", "--log-level", "error")
        kinds = {
            "one": (*common, "--threads", str(cores)),
            "apart": (*common, "--threads", half, "--pd", "1:1"),
        }
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for number in range(args.pairs):
            for kind, words in kinds.items():
                with serving(*words) as url:
                    runs[kind].append(measure(url, args, number))
    found: dict[str, Any] = {
        kind: {key: round(statistics.median(r[key] for r in some), 1) for key in some[0]}
        for kind, some in runs.items()
    }
    pairs = zip(runs["apart"], runs["one"], strict=True)
    found["p99_ratio"] = [round(a["p99_ms"] / b["p99_ms"], 3) for a, b in pairs]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
