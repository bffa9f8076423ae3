"""Claim: on shuffled batches with shared prefixes, the hit rate is close to the optimum.

Runs the real scheduler and cache over an executor that computes nothing, so that the counts are
exact. The optimum computes each distinct prefix once (depth-first order). Belady's bound is the
best result of an offline eviction policy for the order in which requests were started.

    python benchmarks/scheduler/bench_hit_rate.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.sim import SimExecutor
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.utils.clock import VirtualClock


@dataclass(frozen=True)
class Work:
    """Shuffled groups of requests that share a prefix; all arrive at once."""

    groups: int = 64
    per_group: int = 16
    shared: int = 512
    own: int = 32
    outputs: int = 8

    def prompts(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        heads = [rng.integers(0, 50_000, self.shared, np.int32) for _ in range(self.groups)]
        prompts = [
            np.concatenate([head, rng.integers(0, 50_000, self.own, np.int32)])
            for head in heads
            for _ in range(self.per_group)
        ]
        return [prompts[i] for i in rng.permutation(len(prompts))]

    @property
    def total(self) -> int:
        return self.groups * self.per_group * (self.shared + self.own)

    @property
    def best_hits(self) -> int:
        return self.groups * (self.per_group - 1) * self.shared


def run(work: Work, policy: str, cache_tokens: int, page_size: int = 16) -> dict[str, float]:
    groups = [
        KVGroup(
            name="full", kind="full", num_pages=cache_tokens // page_size + 1, page_size=page_size
        )
    ]
    cache = kv_cache(groups, "radix", "lru")
    clock = VirtualClock(1.0)
    started: list[str] = []
    hits: dict[str, int] = {}

    def emit(outputs) -> None:
        for out in outputs:
            if out.rid not in hits:
                started.append(out.rid)
                hits[out.rid] = out.usage.cached_tokens

    executor = SimExecutor(
        lambda req, at: at % 97,
        lambda batch: 0.0,
        ExecutorCaps(max_batch_tokens=2048, max_running_reqs=16),
    )
    parts = SchedulerDeps(
        cache=cache, executor=executor, policy=schedule_policy(policy), emit=emit, clock=clock
    )
    limits = SchedulerLimits(
        max_batch_tokens=2048, chunk_tokens=2048, max_running_reqs=16, age_limit_s=1e9
    )
    scheduler = Scheduler(parts, limits)
    prompts = work.prompts()
    for number, prompt in enumerate(prompts):
        scheduler.add(
            GenerateRequest(
                rid=str(number),
                input_ids=prompt,
                output_ids=EMPTY_IDS,
                sampling=SamplingParams(max_new_tokens=work.outputs, sampling_seed=0),
            )
        )
    while not scheduler.idle:
        scheduler.step()
        clock.advance(0.01)
    got = sum(hits.values())
    bound = belady([prompts[int(rid)] for rid in started], cache_tokens, work.shared)
    return {
        "hit_rate": got / work.total,
        "of_optimum": got / work.best_hits,
        "of_belady_for_this_order": got / max(1, bound),
        "computed_tokens": executor.computed_tokens,
        "steps": executor.steps,
    }


def belady(order: list[np.ndarray], cache_tokens: int, shared: int) -> int:
    """Return the hits of an eviction policy that knows the future, over whole shared prefixes."""
    names = [prompt[:shared].tobytes() for prompt in order]
    later: dict[bytes, list[int]] = {}
    for at, name in enumerate(names):
        later.setdefault(name, []).append(at)
    held: set[bytes] = set()
    hits = 0
    for name in names:
        later[name].pop(0)
        hits += shared if name in held else 0
        held.add(name)
        while len(held) * shared > cache_tokens:
            held.remove(max(held, key=lambda n: later[n][0] if later[n] else 10**9))
    return hits


def main() -> int:
    work = Work()
    for share in (0.05, 0.1, 0.3):
        cache_tokens = int(work.groups * work.shared * share) + 16 * (work.own + work.outputs + 32)
        for policy in ("lpm", "dfs_weight", "fcfs", "random"):
            result = run(work, policy, cache_tokens)
            name = f"{policy}, cache {share:.0%} of the shared prefixes"
            print(json.dumps({"run": name} | {k: round(v, 4) for k, v in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
