"""Claim: at ten times its capacity a server keeps at least 0.9 of its best throughput.

Requests arrive at fixed times, whether or not earlier ones were answered (an open loop), at 1, 2, 5
and 10 times the rate that the server reaches in a closed loop. Both limits of its queue are set, as
docs/security.md advises; requests beyond them are refused. Reports for each load: served and
refused requests per second, the share of the peak, and latencies of answers, of refusals, and of
`/live` meanwhile. Takes one to two minutes.

    python benchmarks/hostile/bench_overload.py [--seconds 10] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from served import percentile, serving

RUNNING, WAITING, TOKENS = 32, 32, 24
BODY = json.dumps(
    {"text": "The sky is", "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}}
).encode()
HEAD = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
POST = HEAD % (b"POST", b"/generate") + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LIVE = HEAD % (b"GET", b"/live") + b"\r\n"


class Pool:
    """Keeps connections open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(self, request: bytes) -> tuple[int, float]:
        """Status and seconds."""
        began = time.perf_counter()
        while True:
            pair = self._idle.pop() if self._idle else None
            reader, writer = pair or await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                if pair is None:
                    raise
                continue  # the server closed it while it was idle
            break
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        self._idle.append((reader, writer))
        return int(head.split()[1]), time.perf_counter() - began


async def closed(port: int, seconds: float) -> float:
    """Run a closed loop with as many clients as requests run; return requests served per second."""
    pool, done, end = Pool(port), 0, time.perf_counter() + seconds

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            status, _ = await pool.call(POST)
            done += status == 200

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(RUNNING)))
    return done / (time.perf_counter() - began)


async def opened(port: int, rate: float, seconds: float) -> dict[str, float]:
    """Run an open loop at a rate; return the outcomes."""
    pool, answers, lives = Pool(port), list[tuple[int, float, float]](), list[float]()
    began = time.perf_counter()

    async def one() -> None:
        status, took = await pool.call(POST)
        answers.append((status, took, time.perf_counter() - began))

    async def watch() -> None:
        while True:
            status, took = await pool.call(LIVE)
            assert status == 200
            lives.append(took)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    tasks, sent = list[asyncio.Task[None]](), 0
    while (now := time.perf_counter() - began) < seconds:
        for _ in range(int(now * rate) - sent):
            tasks.append(asyncio.create_task(one()))
            sent += 1
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    watching.cancel()
    warm = seconds * 0.2
    served = [took for status, took, at in answers if status == 200 and warm < at <= seconds]
    refused = [took for status, took, _ in answers if status in (429, 503)]
    return {
        "arrivals_per_s": round(sent / seconds, 1),
        "served_per_s": round(len(served) / (seconds - warm), 2),
        "refused": len(refused),
        "other": sum(status not in (200, 429, 503) for status, _, _ in answers),
        "served_p50_ms": round(percentile(served, 0.5) * 1e3),
        "served_p99_ms": round(percentile(served, 0.99) * 1e3),
        "refused_p50_ms": round(percentile(refused, 0.5) * 1e3, 2),
        "live_p50_ms": round(percentile(lives, 0.5) * 1e3, 2),
        "live_max_ms": round(max(lives, default=0) * 1e3),
    }


def main() -> None:
    """Run all loads; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = ("--scheduler.max-running-reqs", str(RUNNING))
    flags += ("--scheduler.max-waiting-reqs", str(WAITING))
    rows = []
    with serving(args.model, *flags) as server:
        asyncio.run(closed(server.port, 2))
        capacity = statistics.median(asyncio.run(closed(server.port, 4)) for _ in range(3))
        print(f"capacity {capacity:.1f} requests/s", flush=True)
        for factor in (1, 2, 5, 10):
            row = {
                "times": factor,
                **asyncio.run(opened(server.port, factor * capacity, args.seconds)),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    peak = max(capacity, *(row["served_per_s"] for row in rows))
    print(f"at 10 times: {rows[-1]['served_per_s'] / peak:.3f} of the peak")
    if args.json:
        args.json.write_text(json.dumps({"capacity": capacity, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
