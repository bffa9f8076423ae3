"""Claim: a store below the device makes long chats as quick as an unbounded prefix cache would.

Three comparisons, each with the store off and on in turn, in this process:

* chats whose histories together are several times the device's memory, turn after turn, some at a
  time (`--clients`): time to the first token, requests a second, share of prompt tokens found,
  bytes written for each token;
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
TURN = 64  # tokens that a turn adds to a chat


@dataclass
class Answer:
    first_s: float
    total_s: float
    cached: int
    tokens: list[int]


class Server:
    """A scheduler of this process."""

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
        self._new = args.new

    def ask(self, prompt: list[int]) -> Answer:
        """One request; writes that it left behind are not waited for."""
        return self.ask_all([prompt], 1)[0]

    def ask_all(self, prompts: list[list[int]], clients: int) -> list[Answer]:
        """Requests of so many clients, each of which asks when it has its answer before."""
        answers: dict[str, Answer] = {}
        began: dict[str, float] = {}
        order: list[str] = []
        todo, running = list(reversed(prompts)), 0
        while todo or running:
            while todo and running < clients:
                order.append(self._begin(todo.pop()))
                began[order[-1]] = time.perf_counter()
                running += 1
            if not self.built.scheduler.step():
                time.sleep(0.0005)
            now = time.perf_counter()
            for output in self._outputs:
                answer = answers.setdefault(output.rid, Answer(now - began[output.rid], 0, 0, []))
                answer.tokens += output.token_ids
                if output.finish:
                    answer.total_s = now - began[output.rid]
                    answer.cached = output.usage.cached_tokens
                    running -= 1
            self._outputs.clear()
        return [answers[rid] for rid in order]

    def _begin(self, prompt: list[int]) -> str:
        self._count += 1
        sampling = SamplingParams(
            max_new_tokens=self._new, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        request = GenerateRequest(
            rid=str(self._count),
            input_ids=np.array(prompt, np.int32),
            output_ids=EMPTY_IDS,
            sampling=sampling,
        )
        self.built.scheduler.add(request)
        return request.rid

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
    for history, answer in zip(histories, server.ask_all(histories, args.clients), strict=True):
        history += [*answer.tokens, *prompt_of(rng, TURN)]
    answers: list[Answer] = []
    found = asked = 0
    start = time.perf_counter()
    for _ in range(args.turns):
        given = server.ask_all(histories, args.clients)
        for history, answer in zip(histories, given, strict=True):
            found, asked = found + answer.cached, asked + len(history)
            history += [*answer.tokens, *prompt_of(rng, TURN)]
        answers += given
    spent = time.perf_counter() - start
    return {
        "ttft_p50_ms": 1000 * statistics.median(a.first_s for a in answers),
        "requests_s": len(answers) / spent,
        "hit_rate": found / asked,
        "check": float(sum(sum(history) for history in histories)),
    }


def compare_chats(args: argparse.Namespace) -> dict[str, Any]:
    longest = args.history + (args.turns + 2) * (TURN + args.new) + 128
    size = max(args.history * args.chats // args.times, longest)
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
        "stored_bytes_per_token": counts["stored_bytes"] / new_tokens(args),
    }


def new_tokens(args: argparse.Namespace) -> int:
    """Tokens that all chats have in the end, each of which is computed once at least."""
    return args.chats * (args.history + (args.turns + 1) * (args.new + TURN))


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
    parser.add_argument("--clients", type=int, default=4, help="chats that ask at a time")
    parser.add_argument("--new", type=int, default=16, help="tokens that are generated")
    parser.add_argument("--only", choices=("chats", "restart", "misses"))
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
        if args.only in (None, name):
            print(json.dumps({"comparison": name} | compare(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
