"""Claim: a store below the device makes long chats as quick as an unbounded prefix cache would.

Three comparisons, each with the store off and on in turn, in this process:

* chats whose histories together are several times the device's memory, turn after turn: time to the
  first token, requests a second, share of prompt tokens found;
* a server that starts on a store that an earlier one left, against one that has served the prompt;
* prompts that nobody asked before, which the store can only make slower.

    python benchmarks/engine/bench_tiers.py [--model DIR] [--chats 8] [--turns 3] [--pairs 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler

IDS = (300, 1000)
TURN, NEW = 64, 16  # tokens that a turn adds to a chat, and that are generated


@dataclass
class Answer:
    first_s: float
    total_s: float
    cached: int
    tokens: list[int]


class Server:
    """A scheduler of this process, one request at a time."""

    def __init__(self, args: argparse.Namespace, max_tokens: int, store: Path | None) -> None:
        options: dict[str, Any] = {
            "model": args.model,
            "log_level": "error",
            "cache__max_tokens": max_tokens,
        }
        if args.threads:
            options["threads"] = args.threads
        if args.load_format:
            options["load_format"] = args.load_format
        if store is not None:
            options |= {"tiers__storage": str(store), "tiers__prefetch_min_tokens": TURN}
        self._outputs: list[TokenOutput] = []
        self.built = build_scheduler(gather(from_keywords(options)).config, self._outputs.extend)
        self._count = 0

    def ask(self, prompt: list[int]) -> Answer:
        """One request; writes that it left behind are not waited for."""
        self._outputs.clear()
        self._count += 1
        rid = str(self._count)
        sampling = SamplingParams(
            max_new_tokens=NEW, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        start, first = time.perf_counter(), 0.0
        self.built.scheduler.add(
            GenerateRequest(
                rid=rid,
                input_ids=np.array(prompt, np.int32),
                output_ids=EMPTY_IDS,
                sampling=sampling,
            )
        )
        while not (self._outputs and self._outputs[-1].finish):
            if not self.built.scheduler.step():
                time.sleep(0.0005)
            if self._outputs and not first:
                first = time.perf_counter() - start
        tokens = [token for output in self._outputs for token in output.token_ids]
        cached = self._outputs[-1].usage.cached_tokens
        return Answer(first, time.perf_counter() - start, cached, tokens)

    def settle(self) -> None:
        """Until nothing is on its way to the store."""
        while not self.built.scheduler.idle:
            if not self.built.scheduler.step():
                time.sleep(0.0005)

    def close(self) -> None:
        self.settle()
        self.built.close()


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(*IDS, length).tolist()


def chats(server: Server, args: argparse.Namespace) -> dict[str, float]:
    """Turns of all chats, one after another, so that each finds its history displaced."""
    rng = np.random.default_rng(0)
    histories = [prompt_of(rng, args.history) for _ in range(args.chats)]
    for history in histories:
        history += [*server.ask(history).tokens, *prompt_of(rng, TURN)]
    answers: list[Answer] = []
    found = asked = 0
    start = time.perf_counter()
    for _ in range(args.turns):
        for history in histories:
            answer = server.ask(history)
            found, asked = found + answer.cached, asked + len(history)
            history += [*answer.tokens, *prompt_of(rng, TURN)]
            answers.append(answer)
    spent = time.perf_counter() - start
    return {
        "ttft_p50_ms": 1000 * statistics.median(a.first_s for a in answers),
        "requests_s": len(answers) / spent,
        "hit_rate": found / asked,
        "check": float(sum(sum(history) for history in histories)),
    }


def compare_chats(args: argparse.Namespace) -> dict[str, Any]:
    size = args.history * args.chats // args.times
    size = max(size, args.history + (args.turns + 2) * (TURN + NEW) + 128)
    runs: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            for kind in runs:
                store = Path(folder) / str(pair) if kind == "on" else None
                server = Server(args, size, store)
                runs[kind].append(chats(server, args))
                if kind == "on":
                    server.settle()
                    counts = server.built.stores.describe()["counts"] if server.built.stores else {}
                server.close()
    off, on = (
        {name: statistics.median(r[name] for r in runs[k]) for name in runs[k][0]} for k in runs
    )
    if off.pop("check") != on.pop("check"):
        raise ValueError("the answers differ")
    return {
        "device_tokens": size,
        "off": off,
        "on": on,
        "ttft_ratio": on["ttft_p50_ms"] / off["ttft_p50_ms"],
        "requests_ratio": on["requests_s"] / off["requests_s"],
        "stored_bytes": counts["stored_bytes"],
        "loaded_tokens": counts["loaded_tokens"],
    }


def compare_restart(args: argparse.Namespace) -> dict[str, Any]:
    prompt = prompt_of(np.random.default_rng(1), args.system)
    size = 2 * args.system + 512
    warm: list[float] = []
    restarted: list[float] = []
    cold: list[float] = []
    for _ in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(args, size, Path(folder))
            cold.append(server.ask(prompt).first_s)
            warm.append(server.ask(prompt).first_s)
            server.close()
            server = Server(args, size, Path(folder))
            server.settle()
            restarted.append(server.ask(prompt).first_s)
            server.close()
    times = {"cold": cold, "warm": warm, "restarted": restarted}
    found = {f"{k}_ttft_ms": 1000 * statistics.median(v) for k, v in times.items()}
    return found | {"restarted_over_warm": found["restarted_ttft_ms"] / found["warm_ttft_ms"]}


def compare_misses(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"off": [], "on": []}
    rng = np.random.default_rng(2)
    for _ in range(args.pairs):
        prompts = [prompt_of(rng, args.history) for _ in range(args.chats)]
        for kind, found in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                server = Server(args, 4 * args.history, Path(folder) if kind == "on" else None)
                start = time.perf_counter()
                for prompt in prompts:
                    server.ask(prompt)
                found.append(len(prompts) / (time.perf_counter() - start))
                server.close()
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {"requests_ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--load-format", default="", help="dummy: weights are made up")
    parser.add_argument("--threads", type=int, default=0, help="default: as the engine chooses")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--history", type=int, default=1024, help="tokens that a chat begins with")
    parser.add_argument("--times", type=int, default=5, help="histories over the device's memory")
    parser.add_argument("--system", type=int, default=2048, help="tokens of the system prompt")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    for name, compare in (
        ("chats", compare_chats),
        ("restart", compare_restart),
        ("misses", compare_misses),
    ):
        print(json.dumps({"comparison": name} | compare(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
