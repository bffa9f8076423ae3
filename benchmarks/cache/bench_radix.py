"""Claim: the prefix tree costs microseconds, however many tokens are cached.

Measures match + lock + insert + unlock of a 2,304-token prompt with 1.1 M tokens cached, eviction,
and a whole scheduler step for 256 running requests over 200,000 nodes in 100 namespaces.

    python benchmarks/cache/bench_radix.py [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.eviction import eviction_policy
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import CacheKey
from sylvan.runtime.core.req import Batch
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.sim import SimExecutor
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.plan_builder import PlanBuilder
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.utils import garbage

PROMPT, CACHED, REPEATS = 2304, 1_100_000, 400


def rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spread(values: list[float], scale: float = 1e6) -> dict[str, float]:
    ordered = sorted(v * scale for v in values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[int(len(ordered) * 0.99)], 2),
        "max": round(ordered[-1], 2),
    }


def filled(page_size: int) -> tuple[RadixCache, np.random.Generator, int]:
    rng = np.random.default_rng(0)
    tree, page = RadixCache(page_size, eviction_policy("lru")), 1
    shared = [rng.integers(0, 150_000, 1024, np.int32) for _ in range(20)]
    while tree.total_pages * page_size < CACHED:
        tokens = np.concatenate(
            [shared[rng.integers(20)], rng.integers(0, 150_000, PROMPT - 1024, np.int32)]
        )
        count = -(-len(tokens) // page_size)
        pages = np.arange(page, page + count, dtype=np.int32)
        tree.insert(CacheKey(tokens), pages, with_tail=True)
        page += count
    return tree, rng, page


def one_prompt(page_size: int) -> dict[str, object]:
    before = rss_bytes()
    tree, rng, page = filled(page_size)
    memory = (rss_bytes() - before) / (tree.total_pages * page_size)
    base = next(iter(tree.roots().values()))
    hits = [n.tokens for n in base.children.values()][:20]
    times: list[float] = []
    evict: list[float] = []
    for _ in range(REPEATS):
        head = hits[rng.integers(len(hits))][:1024]
        tokens = np.concatenate([head, rng.integers(0, 150_000, PROMPT - len(head), np.int32)])
        key = CacheKey(tokens)
        pages = np.arange(page, page - (-PROMPT // page_size), dtype=np.int32)
        page += len(pages)
        start = time.perf_counter()
        match = tree.match(key, PROMPT - 1, step=1)
        tree.lock(match.node)
        done = tree.insert(key, pages, with_tail=False, step=1, held=match.node)
        tree.unlock(done.node)
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        tree.evict(done.length // page_size - done.cached // page_size)
        evict.append(time.perf_counter() - start)
    return {
        "page_size": page_size,
        "match_lock_insert_unlock_us": spread(times),
        "evict_as_much_us": spread(evict),
        "bytes_per_cached_token": round(memory, 2),
    }


def whole_steps(num_running: int = 256, nodes: int = 200_000) -> dict[str, object]:
    garbage.freeze()  # as a scheduler process does at start-up
    rng = np.random.default_rng(1)
    groups = [KVGroup(name="full", kind="full", num_pages=700_001, page_size=1)]
    cache = kv_cache(groups, "radix", "lru")
    tree: RadixCache = cache._tree
    page = 1
    while tree.num_nodes < nodes:
        key = CacheKey(rng.integers(0, 100, 3, np.int32), f":{rng.integers(100)}")
        pages = cache._allocator.alloc(3)
        done = tree.insert(key, pages, with_tail=False)
        cache._allocator.free(pages[: done.cached])
        page += 3
    executor = SimExecutor(
        lambda req, at: (at * 7 + int(req.rid)) % 90,
        lambda batch: 0.0,
        ExecutorCaps(max_batch_tokens=8192, max_running_reqs=num_running),
    )
    parts = SchedulerDeps(
        cache=cache,
        executor=executor,
        policy=schedule_policy("lpm"),
        emit=lambda outputs: None,
    )
    scheduler = Scheduler(
        parts, SchedulerLimits(max_running_reqs=num_running, max_waiting_reqs=100_000)
    )
    for number in range(num_running * 6):
        scheduler.add(
            GenerateRequest(
                rid=str(number),
                input_ids=rng.integers(0, 100, rng.integers(20, 200), np.int32),
                output_ids=EMPTY_IDS,
                sampling=SamplingParams(max_new_tokens=int(rng.integers(20, 120)), sampling_seed=0),
                cache_salt=str(rng.integers(100)),
            )
        )
    builder, plans = scheduler._pipeline._builder, [0.0]

    def build(batch: Batch, work: dict[str, Any] | None = None) -> StepPlan:
        start = time.thread_time()
        plan = PlanBuilder.build(builder, batch, work)
        plans[-1] += time.thread_time() - start
        return plan

    builder.build = build
    times: list[float] = []
    full: list[float] = []
    first: list[float] = []  # steps of a burst on an idle server: no request waits for them
    while not scheduler.idle:
        crowded = len(scheduler.running) >= num_running * 0.9
        kind = times if scheduler.running else first
        plans.append(0.0)
        start = time.thread_time()  # the machine's other work is not the scheduler's
        scheduler.step()
        took = time.thread_time() - start
        kind.append(took)
        if crowded:
            full.append(took)
    return {
        "running": num_running,
        "nodes": nodes,
        "steps": len(times),
        "step_cpu_us_with_nobody_running": spread(first),
        "step_cpu_us": spread(times),
        "step_cpu_us_when_full": spread(full or times),
        "of_that_step_plan_cpu_us": spread(plans),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {
        "prompt": [one_prompt(size) for size in (1, 16, 64)],
        "scheduler": whole_steps(),
    }
    print(json.dumps(results, indent=2))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
