"""Claim: the gateway adds less than a millisecond to most requests.

The upstreams answer at once, and the client uses raw connections. The same requests go straight to
an upstream, through `sylvan route`, and through SGLang's router in Rust if a Python with the
package `sglang-router` is named. Measures requests per second at concurrency 1, 32 and 256,
unstreamed and streamed (16 events), and the added latency at a fixed rate. The gateway has a core
of its own if there are two; with `--processes N` gateways of N processes that share a port are
measured as well, on all cores.

    python benchmarks/gateway/bench_overhead.py [--router PYTHON] [--seconds 5] [--rate 500]
        [--processes 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gateway import instant
from benchmarks.gateway.processes import gateway

CONCURRENCY = (1, 32, 256)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


@contextmanager
def upstreams(ports: list[int]) -> Iterator[None]:
    words = [sys.executable, instant.__file__, *map(str, ports)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def rust_router(python: str, urls: list[str], cores: list[int]) -> Iterator[int]:
    port, metrics = free_ports(2)
    words = [python, "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    words += ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    words += ["--prometheus-port", str(metrics), "--log-level", "error"]
    words += ["--worker-startup-check-interval", "1"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pin(process.pid, cores)
        wait_for(port)
        pin(process.pid, cores)
        yield port
    finally:
        process.kill()
        process.wait()


def pin(pid: int, cores: list[int]) -> None:
    for task in os.listdir(f"/proc/{pid}/task") if cores else ():
        os.sched_setaffinity(int(task), cores)


def wait_for(port: int, seconds: float = 60) -> None:
    """Wait until a request is served."""
    deadline = time.monotonic() + seconds
    body = json.loads(instant.request(stream=False).partition(b"\r\n\r\n")[2])
    while time.monotonic() < deadline:
        try:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            if httpx.post(url, json=body, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"nothing is served at port {port}")


def spread(values: list[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    values = sorted(values)
    return {
        f"p{share}_ms": round(1000 * values[min(len(values) - 1, len(values) * share // 100)], 3)
        for share in (50, 99)
    }


async def closed(port: int, count: int, seconds: float, *, stream: bool) -> dict[str, float]:
    """Run a closed loop: each client sends its next request when it has its answer."""
    request = instant.request(stream=stream)
    latencies: list[float] = []
    failures = 0
    connections = [await instant.connect(port) for _ in range(count)]
    deadline = time.perf_counter() + seconds

    async def client(connection: instant.Connection) -> None:
        nonlocal failures
        while time.perf_counter() < deadline:
            good, _, last_s = await connection.ask(request)
            if not good:
                failures += 1
                return
            latencies.append(last_s)

    began = time.perf_counter()
    await asyncio.gather(*map(client, connections))
    rate = len(latencies) / (time.perf_counter() - began)
    if not latencies:
        return {"requests_per_s": 0.0, "failures": failures}
    return {"requests_per_s": round(rate), **spread(latencies), "failures": failures}


async def paced(port: int, rate: float, seconds: float, *, stream: bool) -> dict[str, float]:
    """Run an open loop: requests at a fixed rate, whether or not earlier ones were answered."""
    request = instant.request(stream=stream)
    idle = [await instant.connect(port) for _ in range(32)]
    firsts: list[float] = []
    lasts: list[float] = []
    failures = 0

    async def one(due: float) -> None:
        nonlocal failures
        connection = idle.pop() if idle else await instant.connect(port)
        late_s = time.perf_counter() - due
        good, first_s, last_s = await connection.ask(request)
        if not good:
            failures += 1
            return
        firsts.append(late_s + first_s)
        lasts.append(late_s + last_s)
        idle.append(connection)

    began = time.perf_counter()
    running: set[asyncio.Task[None]] = set()
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (pause := due - time.perf_counter()) > 0:
            await asyncio.sleep(pause)
        task = asyncio.create_task(one(due))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    first = {f"first_{name}": value for name, value in spread(firsts).items()}
    return {**spread(lasts), **first, "failures": failures}


def measure(name: str, port: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for stream in (False, True):
        kind = "stream" if stream else "whole"
        uvloop.run(closed(port, 8, 1.0, stream=stream))  # warm
        for count in args.concurrency:
            work = closed(port, count, args.seconds, stream=stream)
            found[f"{kind} {count}"] = uvloop.run(work)
        work = paced(port, args.rate, args.seconds, stream=stream)
        found[f"{kind} at {args.rate:g}/s"] = uvloop.run(work)
    for case, row in found.items():
        print(f"{name:8} {case:16} {json.dumps(row)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", help="a Python with the package sglang-router")
    parser.add_argument(
        "--processes", type=int, default=1, help="more gateway processes to measure, besides one"
    )
    parser.add_argument("--upstreams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    own = [cores[-1]] if len(cores) > 1 else []
    ports = free_ports(args.upstreams)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    results: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        stack.enter_context(upstreams(ports))
        results["direct"] = measure("direct", ports[0], args)
        with gateway(urls, "--health.interval-s", "5", cores=own) as front:
            port = int(front.url.rpartition(":")[2])
            wait_for(port)
            results["sylvan"] = measure("sylvan", port, args)
        if args.processes > 1:
            many = ("--processes", str(args.processes), "--health.interval-s", "5")
            with gateway(urls, *many) as front:
                port = int(front.url.rpartition(":")[2])
                for _ in range(8 * args.processes):  # each of them has to know the upstreams
                    wait_for(port)
                results[f"{args.processes} procs"] = measure(f"{args.processes} procs", port, args)
        if args.router:
            with rust_router(args.router, urls, own) as port:
                results["rust"] = measure("rust", port, args)
    for name, found in results.items():
        for case, row in found.items():
            if name == "direct" or "/s" not in case or "p50_ms" not in row:
                continue
            added = {k: round(row[k] - results["direct"][case][k], 3) for k in ("p50_ms", "p99_ms")}
            print(f"{name:8} adds to {case}: {json.dumps(added)}")


if __name__ == "__main__":
    main()
