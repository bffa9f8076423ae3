"""Claims: a start takes about as long as `import torch`, and less with a warm load cache.

The first token of the built-in model arrives within twice the time of `import torch` alone; with a
warm load cache, which includes the step program, before `import torch` alone would end. A warm load
cache makes starts of other models faster and changes no token. While it loads, the scheduler's
process uses at most 1.2 times the weights plus 400 MB.

    python benchmarks/server/bench_start.py [MODEL ...] [--runs 3] [--quantization FORMAT] [--crowd]

MODEL is the built-in `sapling`, a directory, or a shape (0.5B, 1B, 1.5B), for which a checkpoint
with random weights is written. Each run times, one after another: `import torch` alone, a start
without a load cache, and a start with a warm one, each until the first token. With `--quantization`
a start that only reads the file, without quantising it, is timed too; the goal is that a quantised
model starts within 1.3 times of that (`load_cache_over_read`, `off_over_read`). Python may write
compiled files, as for installed packages; starts that are not measured create them, and fill the
load cache. Processor time, of all processes and of the busiest one, estimates the duration on an
idle machine. With `--crowd`, 32 requests of 500 tokens follow, and memory is measured under them,
too. Linux; memory is the peak of each process (VmHWM), including files that it read; in the sum
over processes, shared pages count several times.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
from checkpoints import SHAPES, write_checkpoint

MB = 1e6
CROWD, PROMPT, ANSWER = 32, 500, 16
PATIENCE_S = 120.0
_STILL_S = 3.0


@dataclass(frozen=True)
class Setup:
    model: str
    settings: tuple[str, ...]
    rounding: tuple[str, ...]
    environment: dict[str, str]
    crowd: bool


@contextmanager
def directory(model: str, folder: Path) -> Iterator[str]:
    """Return the arguments of `sylvan serve`."""
    if model not in SHAPES:
        yield model
        return
    if not (folder / model).exists():
        write_checkpoint(model, folder / model)
    yield str(folder / model)


def peaks(pid: int) -> dict[int, float]:
    """Return the peak memory of each process of a tree, in MB."""
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


def cpu_s(pid: int) -> list[float]:
    """Return the processor time of each process of a tree so far."""
    root = Path(f"/proc/{pid}")
    try:
        fields = (root / "stat").read_text().rpartition(")")[2].split()
        children = [c for t in root.glob("task/*/children") for c in t.read_text().split()]
    except OSError:
        return []
    ticks = int(fields[11]) + int(fields[12])
    return [ticks / os.sysconf("SC_CLK_TCK"), *(s for c in children for s in cpu_s(int(c)))]


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


def generate(port: int, prompt: int, new: int) -> list[int]:
    ids = [300 + i % 3000 for i in range(prompt)]
    sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0}
    return ask(port, "/generate", {"input_ids": ids, "sampling_params": sampling})["output_ids"]


def started(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait for the first token."""
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


def import_torch(setup: Setup) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=setup.environment, check=True)
    return time.perf_counter() - start


def wait_until_written(cache: Path) -> None:
    """Wait until the files of a load cache, which a server writes while it serves, stop growing."""
    size, since = -1, time.perf_counter()
    while time.perf_counter() < since + _STILL_S or size <= 0:
        time.sleep(0.2)
        now = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        if now != size:
            size, since = now, time.perf_counter()


def serve(
    setup: Setup, *settings: str, fills: Path | None = None
) -> tuple[dict[str, float], list[int]]:
    """Return the times of one start, and the first tokens of an answer; `fills`: a load cache to
    write.
    """
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "sylvan", "serve", setup.model, "--port", str(port)]
    command += [*setup.settings, *settings]
    start = time.perf_counter()
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=setup.environment
    )
    try:
        started(port, server)
        found = {"first_token_s": time.perf_counter() - start}
        spent = cpu_s(server.pid)
        found |= {"cpu_s": sum(spent), "busiest_cpu_s": max(spent)}
        tokens = generate(port, PROMPT, ANSWER)
        memory = ask(port, "/server_info")["internal_states"][0]["memory_usage"]
        weights = memory["weight"] * 1e9 / MB
        held = peaks(server.pid)
        found["weights_mb"] = weights
        found["loading_above_mb"] = max(held.values()) - weights
        found["loading_over_weights"] = max(held.values()) / weights
        if setup.crowd:
            with ThreadPoolExecutor(CROWD) as crowd:
                list(crowd.map(lambda _: generate(port, PROMPT, ANSWER), range(CROWD)))
            held, needed = peaks(server.pid), weights + memory["kvcache"] * 1e9 / MB
            found["scheduler_above_mb"] = max(held.values()) - needed
            found["all_above_mb"] = sum(held.values()) - needed
        if fills is not None:
            wait_until_written(fills)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)
    return found, tokens


def measure(setup: Setup, cache: Path, runs: int) -> dict[str, Any]:
    rounding = setup.rounding
    warm = (*rounding, "--load-cache", str(cache))
    _, tokens = serve(setup, *warm, fills=cache)
    none = ("--load-cache", "none")
    ways = {"off": (*rounding, *none), "load_cache": warm} | ({"read": none} if rounding else {})
    wanted = {name: serve(setup, *none)[1] if name == "read" else tokens for name in ways}
    torch_s: list[float] = []
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(runs):
        torch_s.append(import_torch(setup))
        for name, settings in ways.items():
            found, same = serve(setup, *settings)
            assert same == wanted[name], "another answer"
            rows[name].append(found)
    result: dict[str, Any] = {"import_torch_s": spread(torch_s)}
    for name, found in rows.items():
        result[name] = {key: spread([one[key] for one in found]) for key in found[0]}
        ratios = [one["first_token_s"] / s for one, s in zip(found, torch_s, strict=True)]
        result[name]["over_import_torch"] = spread(ratios)
    result["load_cache_over_off"] = _over(rows["load_cache"], rows["off"])
    if rounding:
        for name in ("load_cache", "off"):
            result[f"{name}_over_read"] = _over(rows[name], rows["read"])
    return result


def _over(some: list[dict[str, float]], others: list[dict[str, float]]) -> list[float]:
    pairs = zip(some, others, strict=True)
    return spread([one["first_token_s"] / other["first_token_s"] for one, other in pairs])


def spread(values: list[float]) -> list[float]:
    """Return median, smallest and largest."""
    return [round(x, 2) for x in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["sapling", "0.5B"], metavar="MODEL")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=CROWD * (PROMPT + 2 * ANSWER))
    parser.add_argument("--quantization", help="as of sylvan serve")
    parser.add_argument("--crowd", action="store_true", help="measure memory under load, too")
    parser.add_argument(
        "--folder", type=Path, help="folder for checkpoints and caches; not deleted"
    )
    args = parser.parse_args()
    settings = ["--cache.max-tokens", str(args.kv_tokens)]
    rounding = ("--quantization", args.quantization) if args.quantization else ()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"PYTHONPYCACHEPREFIX": str(folder / "compiled")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for model in args.models:
            with directory(model, folder) as path:
                setup = Setup(path, tuple(settings), rounding, environment, args.crowd)
                row = measure(setup, folder / "load-cache", args.runs)
            about = {"model": model, "quantization": args.quantization, "cores": os.cpu_count()}
            print(json.dumps(about | row), flush=True)


if __name__ == "__main__":
    main()
