"""Claim: streams survive the death of each process, byte for byte.

Compares 64 concurrent streams (greedy, sampled, with a grammar, with tools, with log probabilities
and with several samples) with the answers of an undisturbed server, while `--chaos` kills the
scheduler and the detokenizer (SIGKILL) at random, until together they have died `--deaths` times.
With `--api` there are two servers behind a gateway, and the API process of one of them is killed
regularly, too. 100 deaths take about ten minutes.

    python benchmarks/hostile/bench_kills.py [--deaths 100] [--streams 64] [--api SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import threading
import time
from typing import Any

import httpx
from served import Server, family, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 7, "ignore_eos": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"tools": [TOOL], "tool_choice": "required", "temperature": 0},
    {"logprobs": True, "top_logprobs": 2, "temperature": 0.5, "seed": 3, "ignore_eos": True},
    {"n": 3, "temperature": 1.0, "seed": 11, "ignore_eos": True},
)


def bodies(count: int) -> list[dict[str, Any]]:
    """Return requests that all differ."""
    return [
        {
            "model": "sapling",
            "messages": [{"role": "user", "content": f"Tell me something about number {i}."}],
            "stream": True,
            "max_tokens": 100,
            "seed": i,
            **KINDS[i % len(KINDS)],
        }
        for i in range(count)
    ]


async def said(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """Return the whole content of a stream, however it was split."""
    texts: dict[int, list[Any]] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            return answer.status_code, (await answer.aread())[:200]
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return event["error"]
            for choice in event["choices"]:
                text = texts.setdefault(choice["index"], ["", "", "", [], None])
                delta = choice["delta"]
                text[0] += delta.get("content") or ""
                text[1] += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or ():
                    text[2] += (call["function"].get("name") or "") + call["function"]["arguments"]
                if choice.get("logprobs"):
                    text[3] += [token["token"] for token in choice["logprobs"]["content"]]
                text[4] = choice.get("finish_reason") or text[4]
    return texts


async def all_said(server: Server, count: int) -> list[Any]:
    """Return the content of all streams, run concurrently."""
    limits = httpx.Limits(max_connections=count)
    base = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=base, timeout=300, limits=limits) as client:
        return await asyncio.gather(*(said(client, body) for body in bodies(count)))


def kill_servers(gateway: int, seconds: float, seed: int, killed: list[int]) -> None:
    """Kill the API process of a random server now and then."""
    dice = random.Random(seed)
    while True:
        time.sleep(seconds)
        servers = [pid for pid, name in family(gateway).items() if name == "api" and pid != gateway]
        if servers:
            killed.append(dice.choice(sorted(servers)))
            os.kill(killed[-1], signal.SIGKILL)


def main() -> int:
    """Run the comparison; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.2, help="kills per second of each process")
    parser.add_argument("--api", type=float, help="seconds between kills of an API process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600, help="time limit in seconds")
    args = parser.parse_args()
    with serving("sapling") as calm:
        expected = asyncio.run(all_said(calm, args.streams))
        again = asyncio.run(all_said(calm, args.streams))
    assert expected == again, "the calm server is not of one mind"
    assert all(isinstance(each, dict) for each in expected), expected
    chaos = f"kill-scheduler={args.rate},kill-detokenizer={args.rate},seed={args.seed}"
    rounds = wrong = 0
    began = time.monotonic()
    killed: list[int] = []
    flags = ("--dp", "2") if args.api else ()
    with serving("sapling", "--chaos", chaos, *flags) as server:
        if args.api:
            killer = (server.process.pid, args.api, args.seed, killed)
            threading.Thread(target=kill_servers, args=killer, daemon=True).start()
        while (
            server.said("chaos: killing") + len(killed) < args.deaths
            and time.monotonic() - began < args.seconds
        ):
            for given, wanted in zip(
                asyncio.run(all_said(server, args.streams)), expected, strict=True
            ):
                if given != wanted:
                    wrong += 1
                    print(f"differs:\n  {given}\n  {wanted}", flush=True)
            rounds += 1
        deaths = {
            name: server.said(f"chaos: killing the {name}") for name in ("scheduler", "detokenizer")
        }
    row = {
        "deaths": {**deaths, "api": len(killed)},
        "streams": rounds * args.streams,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(row))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
