"""Claim: HTTP costs under 60 us per streamed token and under 1 ms per request.

The engine is a stand-in that answers at once (instant.py), so the measurement covers only
admission, tokenisation, state, encoding and sockets, in CPU time of the server process (Linux).
`lag_ms` is how late the server's event loop ran its callbacks, by its own metric. Takes two to
three minutes.

    python benchmarks/server/bench_http_overhead.py [--json PATH] [--streams 1 32 256]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

TOKENS, RUNS = 200, 3
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello there"}]},
    "/v1/completions": {"prompt": "Hello there"},
    "/generate": {"text": "Hello there"},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "Hello there"}]},
}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def body_of(path: str, tokens: int, stream: bool) -> bytes:
    body = {**ROUTES[path], "stream": stream, "max_tokens": tokens}
    if path == "/generate":
        del body["max_tokens"]
        body["sampling_params"] = {"max_new_tokens": tokens}
    return json.dumps(body).encode()


async def connection(port: int, path: str, body: bytes, calls: int) -> list[float]:
    """Return the latency of each call over one keep-alive connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        writer.write(head.encode() + body)
        headers = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in headers[:20], headers
        if b"chunked" in headers:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            length = headers.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
        times.append(time.perf_counter() - began)
    writer.close()
    return times


async def load(port: int, path: str, body: bytes, streams: int, calls: int) -> list[float]:
    times = await asyncio.gather(*(connection(port, path, body, calls) for _ in range(streams)))
    return [t for part in times for t in part]


def lags(port: int) -> tuple[float, float]:
    """Return the sum in seconds and the count of the event loop's delays so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = [line.split() for line in reply.read().decode().splitlines()]
    found = {line[0]: float(line[1]) for line in lines if len(line) == 2}
    name = "sylvan:event_loop_lag_seconds"
    return found[f"{name}_sum"], found[f"{name}_count"]


def measure(pid: int, port: int, path: str, streams: int, *, stream: bool) -> dict[str, float]:
    tokens = TOKENS if stream else 1
    calls = max(1, (8 if stream else 256) * 8 // streams)
    body = body_of(path, tokens, stream)
    costs, rates, latencies = [], [], []
    asyncio.run(load(port, path, body, streams, 1))
    late, turns = lags(port)
    for _ in range(RUNS):
        before, began = cpu_s(pid), time.perf_counter()
        latencies += asyncio.run(load(port, path, body, streams, calls))
        wall = time.perf_counter() - began
        units = streams * calls * (tokens if stream else 1)
        costs.append((cpu_s(pid) - before) / units * 1e6)
        rates.append(units / wall)
    late_after, turns_after = lags(port)
    return {
        "lag_ms": round((late_after - late) / max(1, turns_after - turns) * 1e3, 2),
        "cpu_us": round(statistics.median(costs), 1),
        "cpu_us_min": round(min(costs), 1),
        "cpu_us_max": round(max(costs), 1),
        "per_s": round(statistics.median(rates)),
        "latency_ms": round(statistics.median(latencies) * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 32, 256])
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("instant.py")), str(port)]
    )
    results = []
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        for path in ROUTES:
            for streams in args.streams:
                for stream in (True, False):
                    row = measure(server.pid, port, path, streams, stream=stream)
                    unit = "token" if stream else "request"
                    results.append({"path": path, "streams": streams, "unit": unit, **row})
                    print(json.dumps(results[-1]), flush=True)
    finally:
        server.terminate()
        server.wait()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
