"""Claims: the first token comes within 3 s of the start of the built-in model and 6 s of a 0.5 B
one; the scheduler process peaks at most 400 MB above weights and KV memory, all processes together
at most 700 MB above.

    python benchmarks/server/bench_start.py [MODEL ...] [--runs 3] [--kv-tokens 17024]

MODEL is the built-in `sapling`, a directory, or the shape 0.5B with random weights (a checkpoint on
disk). Each run starts `sylvan serve`, asks until a first token comes, then sends 32 requests of 500
tokens at once. Linux; memory is the sum of what each process held at its peak (VmHWM), so pages
that processes share count several times.
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
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
from checkpoints import SHAPES, write_checkpoint

MB = 1e6
CROWD, PROMPT, ANSWER = 32, 500, 16
PATIENCE_S = 60.0


@contextmanager
def directory(model: str) -> Iterator[str]:
    """What `sylvan serve` is called with."""
    if model not in SHAPES:
        yield model
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_checkpoint(model, folder)
        yield str(folder)


def peaks(pid: int) -> dict[int, float]:
    """Most memory that each process of a tree has held, in MB."""
    root = Path(f"/proc/{pid}")
    try:
        lines = (root / "status").read_text().splitlines()
        children = [c for t in root.glob("task/*/children") for c in t.read_text().split()]
    except OSError:
        return {}  # it has ended
    most = [int(line.split()[1]) * 1024 / MB for line in lines if line.startswith("VmHWM")]
    found = {pid: most[0]} if most else {}
    for child in children:
        found |= peaks(int(child))
    return found


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


def generate(port: int, prompt: int, new: int) -> None:
    ids = [300 + i % 3000 for i in range(prompt)]
    sampling = {"max_new_tokens": new, "ignore_eos": True}
    ask(port, "/generate", {"input_ids": ids, "sampling_params": sampling})


def started(port: int, server: subprocess.Popen[bytes]) -> None:
    """Returns with the first token."""
    until = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < until:
        try:
            generate(port, 8, 1)
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}") from None
            time.sleep(0.01)
        else:
            return
    raise TimeoutError(f"no token within {PATIENCE_S:.0f} s")


def run(model: str, kv_tokens: int) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "sylvan", "serve", model, "--port", str(port)]
    command += ["--cache.max-tokens", str(kv_tokens)]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        started(port, server)
        first_s = time.perf_counter() - start
        with ThreadPoolExecutor(CROWD) as crowd:
            list(crowd.map(lambda _: generate(port, PROMPT, ANSWER), range(CROWD)))
        info = ask(port, "/server_info")
        held = peaks(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)
    memory = info["internal_states"][0]["memory_usage"]
    needed = (memory["weight"] + memory["kvcache"]) * 1e9 / MB
    return {
        "first_token_s": first_s,
        "weights_and_kv_mb": needed,
        "scheduler_above_mb": max(held.values()) - needed,
        "all_above_mb": sum(held.values()) - needed,
        "processes": len(held),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["sapling", "0.5B"], metavar="MODEL")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=CROWD * (PROMPT + 2 * ANSWER))
    args = parser.parse_args()
    for model in args.models:
        with directory(model) as path:
            runs = [run(path, args.kv_tokens) for _ in range(args.runs)]
        row: dict[str, Any] = {"model": model, "cores": os.cpu_count()}
        for name in runs[0]:
            found = sorted(one[name] for one in runs)
            row[name] = [round(x, 2) for x in (statistics.median(found), found[0], found[-1])]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
