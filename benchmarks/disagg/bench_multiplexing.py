"""Claim: prompts computed between steps (`pdmux`) hardly delay decoding requests.

Eight requests decode while prompts of 2,048 tokens arrive one after another. Compares the gaps
between tokens of the decoding requests with prompts computed between steps (`pdmux`) and with
prompts in steps of the default size; runs are interleaved. Goal: the 99th percentile with `pdmux`
is at most 0.7 of that without. The cost is `prompt_s`: seconds until a prompt has its first token.
Weights are random, of a 0.5 B shape.

    python benchmarks/disagg/bench_multiplexing.py [--prompts 2] [--pairs 2] [--wait-ms 50]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

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


class Server:
    """A scheduler in this process."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        given: dict[str, Any] = {"model": str(folder), "load_format": "dummy", "log_level": "error"}
        given |= {"dtype": "bfloat16", "cache__max_tokens": 16384, **options}
        self.outputs: list[TokenOutput] = []
        self.built = build_scheduler(gather(from_keywords(given)).config, self.outputs.extend)

    def add(self, rid: str, length: int, new: int, seed: int) -> None:
        ids = np.random.default_rng(seed).integers(300, 1000, length).astype(np.int32)
        sampling = SamplingParams(
            max_new_tokens=new, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        self.built.scheduler.add(
            GenerateRequest(
                rid=rid, input_ids=ids, output_ids=EMPTY_IDS, sampling=sampling, interval=1
            )
        )

    def measure(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the gaps between tokens of the decoding requests while prompts are computed."""
        scheduler = self.built.scheduler
        for number in range(args.decodes):
            self.add(f"d{number}", 32, 1500, number)
        for _ in range(args.decodes + 8):
            scheduler.step()
        gaps: list[float] = []
        prompts: list[float] = []
        check: list[int] = []
        for number in range(args.prompts):
            self.add(f"p{number}", args.tokens, 1, 100 + number)
            began = last = time.perf_counter()
            done = False
            while not done:
                self.outputs.clear()
                scheduler.step()
                now = time.perf_counter()
                count = sum(len(o.token_ids) for o in self.outputs if o.rid[0] == "d")
                if count:
                    gaps += [now - last] * count
                    last = now
                for output in self.outputs:
                    if output.rid == f"p{number}" and output.finish:
                        check += output.token_ids
                        prompts.append(now - began)
                        done = True
        scheduler.abort_all()
        while not scheduler.idle:
            scheduler.step()
        return {"gaps": gaps, "prompts": prompts, "check": check}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--wait-ms", type=float, default=50.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        kinds = {"off": {}, "on": {"pdmux__wait_ms": args.wait_ms}}
        servers = {kind: Server(folder, options) for kind, options in kinds.items()}
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for _ in range(args.pairs):
            for kind, server in servers.items():
                server.built.scheduler.flush_cache()
                runs[kind].append(server.measure(args))
        for server in servers.values():
            server.built.close()
    if any(run["check"] != runs["off"][0]["check"] for some in runs.values() for run in some):
        raise SystemExit("the answers differ")
    found: dict[str, Any] = {}
    p99 = {kind: [float(np.quantile(r["gaps"], 0.99)) for r in some] for kind, some in runs.items()}
    for kind, some in runs.items():
        gaps = [gap for run in some for gap in run["gaps"]]
        found[kind] = {
            "p50_ms": round(1000 * statistics.median(gaps), 1),
            "p99_ms": round(1000 * float(np.quantile(gaps, 0.99)), 1),
            "longest_ms": round(1000 * max(gaps), 1),
            "prompt_s": round(statistics.median(p for run in some for p in run["prompts"]), 2),
            "decoded_per_s": round(len(gaps) / sum(p for run in some for p in run["prompts"]), 1),
        }
    ratios = [on / off for on, off in zip(p99["on"], p99["off"], strict=True)]
    found["p99_ratio"] = [round(ratio, 3) for ratio in ratios]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
