"""Claim: cache-aware routing beats round-robin if the servers' caches are small.

Groups of requests share a system prompt. All system prompts fit into the caches of all servers
together, but not into the cache of one. Reports each policy's hit rate (cached tokens over prompt
tokens, from `usage`) and requests per second, from empty caches, through the same servers, one
policy after the other.

    python benchmarks/gateway/bench_shared_prefix.py [--workers 8] [--groups 32] [--per-group 12]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gateway.processes import dummy_model, gateway, servers

POLICIES = ("round_robin", "cache_aware")


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return the token IDs of all requests, in an order that mixes the groups."""
    rng = random.Random(args.seed)
    systems = [rng.choices(range(3, 200), k=args.system) for _ in range(args.groups)]
    made = [
        [*system, *rng.choices(range(3, 200), k=args.question)]
        for system in systems
        for _ in range(args.per_group)
    ]
    rng.shuffle(made)
    return made


async def run(url: str, asked: list[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """Send all requests, a number of them at a time."""
    waiting = asyncio.Queue[list[int]]()
    for prompt in asked:
        waiting.put_nowait(prompt)
    cached = total = 0
    latencies: list[float] = []

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal cached, total
        while not waiting.empty():
            body: dict[str, Any] = {
                "input_ids": waiting.get_nowait(),
                "sampling_params": {
                    "max_new_tokens": args.output,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            }
            began = time.perf_counter()
            answer = await http.post(f"{url}/generate", json=body)
            latencies.append(time.perf_counter() - began)
            answer.raise_for_status()
            meta = answer.json()["meta_info"]
            cached += meta["cached_tokens"]
            total += meta["prompt_tokens"]

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        began = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(args.concurrency)))
        spent = time.perf_counter() - began
    latencies.sort()
    return {
        "hit_rate": cached / total,
        "requests_per_s": len(asked) / spent,
        "p50_s": latencies[len(latencies) // 2],
        "seconds": spent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--per-group", type=int, default=12)
    parser.add_argument("--system", type=int, default=1024, help="tokens of a system prompt")
    parser.add_argument("--question", type=int, default=64, help="tokens of a question")
    parser.add_argument("--output", type=int, default=4)
    parser.add_argument("--cache", type=int, default=8192, help="tokens of a server's cache")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asked = prompts(args)
    flags = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1")
    flags = (*flags, "--processes", "one", "--max-total-tokens", str(args.cache))
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    with (
        dummy_model(args.hidden, args.layers, 4096) as model,
        servers(model, args.workers, *flags) as workers,
    ):
        urls = [worker.url for worker in workers]
        for _ in range(args.rounds):
            for policy in POLICIES:
                for url in urls:
                    httpx.post(f"{url}/flush_cache").raise_for_status()
                with gateway(urls, "--policy", policy) as front:
                    wait_for(front.url, len(urls))
                    found[policy].append(asyncio.run(run(front.url, asked, args)))
                print(policy, json.dumps(found[policy][-1]), flush=True)
    best = {policy: max(rows, key=lambda r: r["requests_per_s"]) for policy, rows in found.items()}
    turns, aware = best["round_robin"], best["cache_aware"]
    print(
        f"hit rate {aware['hit_rate'] / max(turns['hit_rate'], 1e-9):.2f}x, "
        f"throughput {aware['requests_per_s'] / turns['requests_per_s']:.2f}x"
    )


def wait_for(url: str, count: int) -> None:
    """Wait until the gateway knows all servers."""
    while True:
        answer = httpx.get(f"{url}/readiness")
        if answer.status_code == 200 and answer.json()["healthy_workers"] == count:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
