"""Claim: the interpreter costs at most 100 us per `gen`, and parallel programs use a bounded number
of threads.

Runs programs of 1,000 gens over a backend that answers at once, in four shapes; then 256 programs
in parallel over a backend that takes 10 ms, and reports their threads and memory.

    python benchmarks/lang/bench_interpreter_overhead.py [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import threading
import time
from pathlib import Path

import sylvan as sgl
from sylvan.lang.backends.api import BaseBackend

GENS, REPEATS, PROGRAMS, LATENCY_S = 1000, 7, 256, 0.01
BUDGET_US = 100.0


class Instant(BaseBackend):
    """Answers at once, or after `latency_s`."""

    def __init__(self, latency_s=0.0):
        super().__init__()
        self.latency_s = latency_s
        self.peak_threads = 0

    def generate(self, s, sampling_params):
        if self.latency_s:
            time.sleep(self.latency_s)
            self.peak_threads = max(self.peak_threads, threading.active_count())
        return "x", {}


@sgl.function
def append_only(s, n):
    for i in range(n):
        s += "Q" + sgl.gen(f"v{i}", max_tokens=8)


@sgl.function
def read_each(s, n):
    for _ in range(n):
        s += "Q" + sgl.gen("v", max_tokens=8)
        s["v"]


@sgl.function
def chat_turns(s, n):
    for _ in range(n):
        s += sgl.user("Q")
        s += sgl.assistant(sgl.gen("v", max_tokens=8, stop="\n"))


@sgl.function
def forks(s, n):
    for _ in range(n // 10):
        group = s.fork(10)
        group += sgl.gen("v", max_tokens=8)
        group.join()


@sgl.function
def parallel(s, i):
    s += f"{i}" + sgl.gen("a")
    group = s.fork(4)
    group += sgl.gen("b")
    group.join()


def us_per_gen(program, use_thread):
    backend = Instant()
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        program.run(GENS, backend=backend, use_thread=use_thread)
        times.append((time.perf_counter() - start) / GENS * 1e6)
    times = times[1:]  # the first one warms up
    return {"median": round(statistics.median(times), 1), "max": round(max(times), 1)}


def parallel_programs():
    backend = Instant(LATENCY_S)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    parallel.run_batch([{"i": i} for i in range(PROGRAMS)], backend=backend)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "programs": PROGRAMS,
        "gens": PROGRAMS * 5,
        "seconds": round(seconds, 3),
        "peak_threads": backend.peak_threads,
        "grown_rss_mib": round((after - before) / 1024, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes = {
        f"{program.func.__name__}{'' if use_thread else ', no threads'}": us_per_gen(
            program, use_thread
        )
        for program in (append_only, read_each, chat_turns, forks)
        for use_thread in (True, False)
    }
    result = {"us_per_gen": shapes, "budget_us": BUDGET_US, "parallel": parallel_programs()}
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
