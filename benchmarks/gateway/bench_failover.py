"""Claim: streams survive servers that are killed or hang, one after the other, without loss or
change.

Clients stream through a gateway without a break. Every few seconds a random server is killed
(SIGKILL) or suspended (SIGSTOP), and a new one is started at the same address. Each text is
compared with the text of the same request in an undisturbed run. Counts the streams that were
complete and identical.

    python benchmarks/gateway/bench_failover.py [--signal KILL|STOP] [--seconds 60] [--every 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gateway.bench_shared_prefix import wait_for
from benchmarks.gateway.processes import SERVES, Running, begin, dummy_model, gateway, url_of

FLAGS = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1")
FLAGS = (*FLAGS, "--processes", "one", "--max-total-tokens", "64Ki")

KEEP_ALIVE_S = 3.5  # servers close idle connections after 5 s; who closes first is in no race


class Streams:
    """Clients that send one request after the other."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._url = url
        self._args = args
        self.expected: dict[int, str] = {}
        self.outcomes = Counter[str]()
        self.over = False

    def body(self, number: int) -> dict[str, Any]:
        return {
            "prompt": f"Stream {number}: ",
            "max_tokens": self._args.tokens,
            "ignore_eos": True,
            "seed": number,
            "temperature": 0.0 if number % 2 else 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def text(self, http: httpx.AsyncClient, number: int) -> str:
        """The text of a stream.

        Raises:
            ValueError: It is not complete, or its usage is not that of one request.
        """
        parts: list[str] = []
        used, ended = None, False
        url = f"{self._url}/v1/completions"
        async with http.stream("POST", url, json=self.body(number)) as answer:
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    parts += [choice["text"] for choice in event["choices"]]
                    used = event.get("usage") or used
        if not ended:
            raise ValueError("cut short")
        if used is None or used["completion_tokens"] != self._args.tokens:
            raise ValueError(f"usage {used}")
        return "".join(parts)

    async def learn(self, http: httpx.AsyncClient) -> None:
        numbers = range(self._args.streams)
        texts = await asyncio.gather(*(self.text(http, number) for number in numbers))
        self.expected = dict(zip(numbers, texts, strict=True))

    async def keep(self, http: httpx.AsyncClient, number: int) -> None:
        while not self.over:
            try:
                text = await self.text(http, number)
            except (ValueError, httpx.HTTPError) as error:
                self.outcomes[f"lost: {str(error)[:80] or type(error).__name__}"] += 1
            else:
                same = text == self.expected[number]
                self.outcomes["identical" if same else "different"] += 1


async def disturb(
    servers: list[Running], model: str, streams: Streams, args: argparse.Namespace
) -> int:
    """Kill or suspend servers until the time is over; return how many."""
    rng = random.Random(args.seed)
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + args.seconds
    starting: set[asyncio.Task[None]] = set()
    down: set[int] = set()
    count = 0

    async def replace(index: int) -> None:
        old = servers[index]
        if args.signal == "STOP":
            await asyncio.sleep(args.hang)
        await loop.run_in_executor(None, old.end)
        port = old.url.rpartition(":")[2]
        process = begin(["serve", model, "--port", port, *FLAGS])
        servers[index] = Running(process, old.url)
        await loop.run_in_executor(None, url_of, process, SERVES)
        down.discard(index)

    while time.monotonic() < deadline:
        await asyncio.sleep(args.every)
        alive = [i for i in range(len(servers)) if i not in down]
        if len(alive) <= args.spare:
            continue
        index = rng.choice(alive)
        down.add(index)
        servers[index].kill(getattr(signal, f"SIG{args.signal}"))
        count += 1
        task = asyncio.create_task(replace(index))
        starting.add(task)
        task.add_done_callback(starting.discard)
    streams.over = True
    await asyncio.gather(*starting)
    return count


async def measure(servers: list[Running], model: str, url: str, args: argparse.Namespace) -> None:
    streams = Streams(url, args)
    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S)
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        await streams.learn(http)
        clients = [asyncio.create_task(streams.keep(http, n)) for n in range(args.streams)]
        count = await disturb(servers, model, streams, args)
        await asyncio.gather(*clients)
    total = sum(streams.outcomes.values())
    print(json.dumps({"signals": count, "streams": total, **streams.outcomes}))
    print(f"{streams.outcomes['identical'] / total:.1%} of {total} streams identical")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between signals")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument(
        "--hang", type=float, default=8.0, help="seconds for which a server is suspended"
    )
    parser.add_argument("--stall", type=float, default=4.0, help="failover.stall_s")
    parser.add_argument("--spare", type=int, default=2, help="servers that are never disturbed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with dummy_model(64, 2, 4096) as model:
        begun = [begin(["serve", model, "--port", "0", *FLAGS]) for _ in range(args.workers)]
        servers = [Running(process, "") for process in begun]
        try:
            for server in servers:
                server.url = url_of(server.process, SERVES)
            urls = [server.url for server in servers]
            flags = ("--failover.stall-s", str(args.stall), "--health.interval-s", "0.5")
            flags = (*flags, "--health.successes", "1")
            with gateway(urls, *flags) as front:
                wait_for(front.url, len(urls))
                asyncio.run(measure(servers, model, front.url, args))
        finally:
            for server in servers:
                server.end()


if __name__ == "__main__":
    main()
