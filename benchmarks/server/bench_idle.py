"""Claim: an idle server uses at most 2% of a core, all processes together, also after a burst.

    python benchmarks/server/bench_idle.py [MODEL ...] [--seconds 30] [--runs 3] [--limit 2]

MODEL as for `bench_start.py`. Each run starts `sylvan serve`, requests one token, waits until the
server is idle, and reads the CPU time of its processes (/proc/PID/stat: all threads, user and
system) before and after `--seconds` without a request; then again after 32 concurrent requests,
after which threads must stop spinning. Prints percent of one core; exits with 1 if the median is
above `--limit`. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench_start import ANSWER, CROWD, PATIENCE_S, PROMPT, directory, generate, started

SETTLE_S = 2.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> dict[int, float]:
    """Return the CPU time of each living process of a tree so far."""
    root = Path(f"/proc/{pid}")
    try:
        fields = (root / "stat").read_text().rpartition(")")[2].split()
        children = [c for t in root.glob("task/*/children") for c in t.read_text().split()]
    except OSError:
        return {}  # it has ended
    found = {pid: (int(fields[11]) + int(fields[12])) / TICKS}
    for child in children:
        found |= cpu_seconds(int(child))
    return found


def idle(pid: int, seconds: float) -> dict[str, float]:
    """Return percent of a core over some seconds, for all processes and for the busiest."""
    time.sleep(SETTLE_S)
    start, before = time.perf_counter(), cpu_seconds(pid)
    time.sleep(seconds)
    after, wall = cpu_seconds(pid), time.perf_counter() - start
    if set(before) != set(after):
        raise RuntimeError("processes came or went while the server was idle")
    used = [100 * (after[one] - before[one]) / wall for one in after]
    return {"all": sum(used), "busiest": max(used), "processes": len(used)}


def run(model: str, seconds: float, *, quiet: bool = True) -> dict[str, dict[str, float]]:
    """Return the resource usage of a server after its start, and after a burst."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "sylvan", "serve", model, "--port", str(port)]
    command += ["--cache.max-tokens", str(CROWD * (PROMPT + 2 * ANSWER))]
    sink = subprocess.DEVNULL if quiet else None
    server = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        started(port, server)
        first = idle(server.pid, seconds)
        with ThreadPoolExecutor(CROWD) as crowd:
            list(crowd.map(lambda _: generate(port, PROMPT, ANSWER), range(CROWD)))
        return {"started": first, "after a crowd": idle(server.pid, seconds)}
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["sapling"], metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=2.0, help="percent of a core")
    parser.add_argument("--verbose", action="store_true", help="show what the server prints")
    args = parser.parse_args()
    over = False
    for model in args.models:
        with TemporaryDirectory() as folder, directory(model, Path(folder)) as path:
            runs = [run(path, args.seconds, quiet=not args.verbose) for _ in range(args.runs)]
        row: dict[str, Any] = {"model": model, "seconds": args.seconds, "cores": os.cpu_count()}
        for when in runs[0]:
            for what in runs[0][when]:
                found = sorted(one[when][what] for one in runs)
                values = (statistics.median(found), found[0], found[-1])
                row[f"{when}: {what}"] = [round(x, 2) for x in values]
            over |= row[f"{when}: all"][0] > args.limit
        print(json.dumps(row), flush=True)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
