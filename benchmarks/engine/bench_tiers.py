"""Claim: with a KV store, long chats are as fast as with an unbounded prefix cache.

Four comparisons in this process, each interleaved with the store off and on:

* chats whose histories together are several times the device's memory, turn after turn, some at a
  time (`--clients`): time to the first token, requests per second, share of prompt tokens found,
  bytes written per token; and the share that a device with enough memory for everything finds;
* a server that starts on a store left by an earlier one, against a server that has served the
  prompt: a system prompt with a new question each time, and the same prompt again; each server
  is idle for `--rest` seconds before its first request;
* new prompts, which a store can only slow down;
* prompts that are in the store, but the store is gone, or takes half a minute for each answer.

    python benchmarks/engine/bench_tiers.py [--model DIR] [--chats 8] [--turns 3] [--pairs 3]

`--model 0.5B` is a model of that shape with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import sylvan
from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.storage.api import StoreError, StoreLimits
from sylvan.runtime.storage.backends.memory import open_memory

IDS = (300, 1000)
TURN = 64  # tokens that a turn adds to a chat
QUESTION = 16  # tokens behind a system prompt
HANGS_S = 30.0
SHAPE = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())


@dataclass
class Answer:
    first_s: float
    total_s: float
    cached: int
    tokens: list[int]


class Server:
    """A scheduler in this process."""

    def __init__(self, args: argparse.Namespace, max_tokens: int, store: object = None) -> None:
        options: dict[str, Any] = {
            "model": args.model,
            "log_level": "error",
            "cache__max_tokens": max_tokens,
        }
        if args.page_size:
            options["cache__page_size"] = args.page_size
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
        """Serve one request; do not wait for the writes that it causes."""
        return self.ask_all([prompt], 1)[0]

    def ask_all(self, prompts: list[list[int]], clients: int) -> list[Answer]:
        """Serve requests of several clients; each client sends its next one after its answer."""
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
        """Wait until nothing is on its way to the store."""
        while not self.built.scheduler.idle:
            if not self.built.scheduler.step():
                time.sleep(0.0005)

    def close(self) -> None:
        self.settle()
        self.built.close()


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(*IDS, length).tolist()


def chats(server: Server, args: argparse.Namespace) -> dict[str, float]:
    """Run the turns of all chats one after another, so that each turn finds its history evicted."""
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
    runs: dict[str, list[dict[str, float]]] = {"off": [], "on": [], "unbounded": []}
    counts: dict[str, int] = {}
    token_bytes = 1.0
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            for kind, own in runs.items():
                store = Path(folder) / str(pair) if kind == "on" else None
                if kind == "unbounded" and pair:
                    continue
                room = longest * args.chats if kind == "unbounded" else size
                server = Server(args, room, store)
                own.append(chats(server, args))
                if kind == "on":
                    server.settle()
                    counts = server.built.stores.describe()["counts"] if server.built.stores else {}
                    facts = server.built.facts
                    token_bytes = int(facts["kv_bytes"] or 0) / int(facts["max_total_tokens"] or 1)
                server.close()
    ratios = {
        f"{name}_ratio": spread(
            [a[key] / b[key] for a, b in zip(runs["on"], runs["off"], strict=True)]
        )
        for name, key in (("ttft", "ttft_p50_ms"), ("requests", "requests_s"))
    }
    found = {
        kind: {name: statistics.median(r[name] for r in own) for name in own[0]}
        for kind, own in runs.items()
    }
    if len({each.pop("check") for each in found.values()}) > 1:
        raise ValueError("the answers differ")
    return {
        "device_tokens": size,
        **found,
        **ratios,
        "stored_bytes": counts["stored_bytes"],
        "loaded_tokens": counts["loaded_tokens"],
        "stored_bytes_per_token": counts["stored_bytes"] / new_tokens(args),
        "write_amplification": counts["stored_bytes"] / new_tokens(args) / token_bytes,
    }


def spread(values: list[float]) -> list[float]:
    """Return median, smallest and largest."""
    return [round(f(values), 4) for f in (statistics.median, min, max)]


def new_tokens(args: argparse.Namespace) -> int:
    """Return the number of distinct tokens of all chats, which are computed at least once."""
    return args.chats * (args.history + (args.turns + 1) * (args.new + TURN))


def compare_restart(args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    prompt, size = prompt_of(rng, args.system), 3 * args.system + 512
    times: dict[str, list[float]] = {}

    def ask(server: Server, name: str, more: list[int]) -> None:
        times.setdefault(name, []).append(server.ask([*prompt, *more]).first_s)

    for _ in range(args.pairs):
        first, *others = (prompt_of(rng, QUESTION) for _ in range(4))
        other = prompt_of(rng, QUESTION + 1)  # something else, as after any start
        with tempfile.TemporaryDirectory() as folder:
            server = Server(args, size, Path(folder))
            time.sleep(args.rest)
            server.ask(other)
            ask(server, "cold", first)
            ask(server, "warm", others[0])
            ask(server, "warm_again", others[0])
            server.close()
            server = Server(args, size, Path(folder))
            time.sleep(args.rest)
            server.ask(other)
            ask(server, "restarted", others[1])
            server.close()
            server = Server(args, size, Path(folder))
            time.sleep(args.rest)
            server.ask(other)
            ask(server, "restarted_again", first)
            server.close()
    found = {f"{k}_ttft_ms": spread([1000 * each for each in v]) for k, v in times.items()}
    ratios = {
        f"{a}_over_{b}": spread([x / y for x, y in zip(times[a], times[b], strict=True)])
        for a, b in (("restarted", "warm"), ("restarted_again", "warm_again"))
    }
    return found | ratios


def compare_misses(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"off": [], "on": []}
    rng = np.random.default_rng(2)
    for pair in range(args.pairs):
        prompts = [prompt_of(rng, args.history) for _ in range(args.chats)]
        for kind in ("off", "on") if pair % 2 else ("on", "off"):
            with tempfile.TemporaryDirectory() as folder:
                server = Server(args, 4 * args.history, Path(folder) if kind == "on" else None)
                server.ask(prompt_of(rng, QUESTION))
                start = time.perf_counter()
                for prompt in prompts:
                    server.ask(prompt)
                rates[kind].append(len(prompts) / (time.perf_counter() - start))
                server.close()
    return {
        "requests_ratio": spread(
            [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
        )
    }


def compare_broken(args: argparse.Namespace) -> dict[str, Any]:
    """Measure prompts that are in a store that then fails, or answers after half a minute."""
    found: dict[str, Any] = {}
    for kind, fault in (("gone", fails), ("hangs", hangs)):
        ratios: list[float] = []
        for pair in range(args.pairs):
            rng = np.random.default_rng(3)
            prompts = [prompt_of(rng, args.history) for _ in range(args.chats)]
            size = args.history + 512
            spent: list[float] = []
            for url in (None, f"memory:{kind}-{pair}"):
                server = Server(args, size, url)
                server.ask_all(prompts, 1)  # learns its speeds
                server.ask_all(prompts[:2], 1)
                server.settle()
                if url is not None:
                    open_memory(url, StoreLimits()).fault = fault
                start = time.perf_counter()
                server.ask_all(prompts, 1)
                spent.append(time.perf_counter() - start)
                if url is not None:
                    open_memory(url, StoreLimits()).fault = works
                server.built.close()
            ratios.append(spent[1] / spent[0])
        found[f"{kind}_over_computing"] = spread(ratios)
    return found


def works(method: str, name: str) -> None:
    """A store as it should be."""


def fails(method: str, name: str) -> None:
    raise StoreError("gone")


def hangs(method: str, name: str) -> None:
    time.sleep(HANGS_S)


@contextlib.contextmanager
def half_billion() -> Iterator[str]:
    """Write the built-in model's directory with another shape and without weights."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(sylvan.__file__).parent / "assets" / "sapling"
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, folder)
        config = json.loads((source / "config.json").read_text()) | SHAPE
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


Compare = Callable[[argparse.Namespace], dict[str, Any]]
COMPARISONS: dict[str, Compare] = {
    "chats": compare_chats,
    "restart": compare_restart,
    "misses": compare_misses,
    "broken": compare_broken,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sapling", help="directory, or 0.5B")
    parser.add_argument("--load-format", default="", help="dummy: random weights")
    parser.add_argument("--threads", type=int, default=0, help="default: the engine's choice")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--clients", type=int, default=4, help="concurrent chats")
    parser.add_argument("--new", type=int, default=16, help="output tokens")
    parser.add_argument("--only", choices=tuple(COMPARISONS), action="append")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--history", type=int, default=1024, help="prompt tokens of a chat's first turn"
    )
    parser.add_argument(
        "--times", type=int, default=5, help="ratio of all histories to the device's memory"
    )
    parser.add_argument("--page-size", type=int, default=0, help="default: the engine's choice")
    parser.add_argument("--system", type=int, default=2048, help="tokens of the system prompt")
    parser.add_argument("--rest", type=float, default=1.0, help="idle seconds after a start")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.model == "0.5B":
            args.model, args.load_format = stack.enter_context(half_billion()), "dummy"
        for name, compare in COMPARISONS.items():
            if args.only is None or name in args.only:
                print(json.dumps({"comparison": name} | compare(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
