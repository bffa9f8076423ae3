"""Measures one peer in one format and shape: loads it, runs each workload, prints a JSON line for
each.

Started by `compare.py` in the peer's environment. With `convert` or `write` as the first word it
only converts; `check` prints the peer's answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import PEERS, Generate, Job, Prompts
from stored_models import write_stored

TOKENS = range(300, 4000)
_MIN_S = 1.0  # of decoding: less is measured again with more tokens
_MAX_NEW = 1600


def random_prompts(count: int, length: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [rng.choices(TOKENS, k=length) for _ in range(count)]


def counted(generate: Generate) -> Generate:
    """Wrap a generator: reject answers with another number or length than requested."""

    def generate_exactly(prompts: Prompts, count: int) -> list[list[int]]:
        found = generate(prompts, count)
        lengths = [len(row) for row in found]
        if lengths != [count] * len(prompts):
            raise ValueError(f"asked for {len(prompts)} answers of {count} tokens, got {lengths}")
        return found

    return generate_exactly


def seconds(generate: Generate, prompts: Prompts, count: int) -> float:
    start = time.perf_counter()
    generate(prompts, count)
    return time.perf_counter() - start


def cpu_seconds(pid: int = os.getpid()) -> float:
    """Return the processor time of a process and its descendants."""
    root = Path(f"/proc/{pid}")
    try:
        used = (root / "stat").read_text().rpartition(")")[2].split()[11:13]  # user, system
        children = [c for t in root.glob("task/*/children") for c in t.read_text().split()]
    except OSError:
        return 0.0  # it has ended
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(map(int, used)) / ticks + sum(cpu_seconds(int(child)) for child in children)


def measure(generate: Generate, options: argparse.Namespace) -> None:
    seed = options.round * 1000
    for length in options.prefill:
        generate(random_prompts(1, length, seed + 1), 1)  # warm up
        spent = seconds(generate, random_prompts(1, length, seed + 2), 1)
        report(f"prefill {length}", length / spent)
    for size in options.batch:
        generate(random_prompts(size, 16, seed + 3), 3)  # warm up: steps of this many requests
        new = options.new
        while not _decoded(generate, options, size, new):
            new *= 4


def _decoded(generate: Generate, options: argparse.Namespace, size: int, new: int) -> bool:
    """Measure `new` tokens after the first of `size` requests; False: it ended too soon to tell.

    The time of the prompts, with the first token, is measured before and after, and subtracted.
    """
    seed = options.round * 1000
    before = seconds(generate, random_prompts(size, options.prompt, seed + 4), 1)
    prompts = random_prompts(size, options.prompt, seed + 5)
    used = cpu_seconds()
    whole = seconds(generate, prompts, new + 1)
    used = cpu_seconds() - used
    first = (before + seconds(generate, random_prompts(size, options.prompt, seed + 6), 1)) / 2
    if whole - first < _MIN_S and 4 * new <= _MAX_NEW:
        return False
    if whole > first:
        report(f"decode {size}", size * new / (whole - first))
        report(f"cores busy at decode {size}", used / whole)
    return True


def measure_shared(generate: Generate, options: argparse.Namespace) -> None:
    prefix = random_prompts(1, options.shared_prefix, options.round + 7)[0]
    own = random_prompts(options.shared, 32, options.round + 8)
    generate(random_prompts(1, 40, 6), 2)
    spent = seconds(generate, [prefix + each for each in own], 32)
    report("shared prefix", options.shared / spent)


def say(**told: Any) -> None:
    print(f"\n{json.dumps(told)}", flush=True)


def report(what: str, value: float) -> None:
    say(what=what, value=value)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=["convert", "write", "check", "measure", "shared"])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("format")
    parser.add_argument("model", type=Path)
    parser.add_argument("extra", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--variant", help="variant of Sylvan's kernels, such as avx512; default: the best"
    )
    parser.add_argument("--ranks", type=int, default=1, help="divide layers, and the threads")
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument(
        "--new", type=int, default=64, help="output tokens; more if they take too little time"
    )
    parser.add_argument(
        "--prompt", type=int, default=32, help="length of the prompts that are decoded from"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--shared", type=int, default=64)
    parser.add_argument("--shared-prefix", type=int, default=1024)
    return parser.parse_args()


def main() -> None:
    options = _parsed()
    peer = PEERS[options.peer]
    if options.job == "write":
        write_stored(options.model, options.format, options.extra)
        return
    if options.job == "convert":
        assert peer.convert is not None
        peer.convert(options.model, options.format, options.extra)
        return
    say(version=f"{peer.distribution} {version(peer.distribution)}")
    start = time.perf_counter()
    shared = options.job == "shared"
    job = Job(
        options.model,
        options.format,
        options.threads,
        options.extra,
        shared,
        options.variant,
        options.ranks,
    )
    if options.ranks > 1 and options.peer not in ("sylvan", "vllm"):
        sys.exit(f"{options.peer} does not divide layers among the cores of a machine")
    try:
        work(counted(peer.load(job)), options, start)
    finally:
        for end in job.endings:
            end()


def work(generate: Generate, options: argparse.Namespace, start: float) -> None:
    """Run the job; loading began at `start`."""
    if options.job == "check":
        say(tokens=generate(random_prompts(16, 32, 5), 8))
    elif options.job == "shared":
        measure_shared(generate, options)
    else:
        generate(random_prompts(1, 32, 5), 1)
        report("start to first token", time.perf_counter() - start)
        measure(generate, options)


if __name__ == "__main__":
    main()
    # a library may keep threads that do not end: all is said, and the next peer waits
    os._exit(0)
