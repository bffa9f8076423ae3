"""Claim: 1,000 workers and a million requests are simulated in minutes, on one core.

Each worker runs the real scheduler and cache, and a policy of the gateway routes each request. The
off switch simulates each decode step separately (`SimulatedReplica.skips`); the results are
identical. Reports CPU time, because other programs may share the core.

    python benchmarks/simulate/bench_speed.py [--replicas 1000] [--requests 100000] [--policy ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

from sylvan.config.bench import DataConfig
from sylvan.config.route import RoutingConfig
from sylvan.config.simulate import ArrivalConfig
from sylvan.runtime.cache.groups import KVGroup
from sylvan.sim.cost import HostCost, StepCost
from sylvan.sim.datasets import arranged, drawn
from sylvan.sim.features import KNOTS
from sylvan.sim.fleet import YOUNG_OBJECTS, Fleet
from sylvan.sim.profile import Profile, SchedulerProfile
from sylvan.utils.garbage import freeze

PER_WORKER = 2.0  # requests a second
FLOOR_S, ROW_S, BOUND_ROWS = 6e-3, 9e-5, 64


def profile() -> Profile:
    """Return a device that is memory-bound up to 64 rows, with 64 Ki tokens of KV."""
    rows = tuple(ROW_S if knot >= BOUND_ROWS else 0.0 for knot in KNOTS)
    step = StepCost(
        constant=FLOOR_S, rows=rows, context=4e-7,
        decode_scatter=(0.9, 1.0, 1.1), prompt_scatter=(0.9, 1.0, 1.1),
    )  # fmt: skip
    engine = SchedulerProfile(
        kv_groups=(KVGroup(name="full", kind="full", num_pages=4097, page_size=16),),
        policy="lpm",
        settings={"max_batch_tokens": 2048, "chunk_tokens": 512, "max_running_reqs": 64},
        num_slots=64,
    )
    return Profile(engine=engine, step=step, host=HostCost(constant=2e-4, slice=5e-6))


def workload(replicas: int, requests: int):
    """Return groups of 25 prompts that share 256 tokens; 32 to 128 question tokens, 64 to 128
    output tokens.
    """
    data = DataConfig(
        dataset="shared-prefix", groups=max(1, requests // 25), prompts_per_group=25,
        system_tokens=256, question_tokens=128, output_tokens=128, range_ratio=0.5,
    )  # fmt: skip
    return arranged(drawn(data), ArrivalConfig(rate=PER_WORKER * replicas), 1)


def run(replicas: int, requests: int, policy: str, *, skips: bool) -> list[float]:
    work = workload(replicas, requests)
    freeze(YOUNG_OBJECTS)
    made_s = time.process_time()
    fleet = Fleet(profile(), RoutingConfig(policy=policy), replicas, seed=1, skips=skips)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    outcomes = fleet.run(work)
    made_s = cpu_s - made_s
    cpu_s = time.process_time() - cpu_s
    steps = sum(replica.executor.steps for replica in fleet.replicas)
    result = {
        "policy": policy, "replicas": replicas, "requests": len(outcomes), "skips": skips,
        "wall_s": round(time.perf_counter() - began_s, 1),
        "cpu_s": round(cpu_s, 1), "made_cpu_s": round(made_s, 1),
        "requests_per_cpu_s": round(len(outcomes) / cpu_s), "steps": steps,
        "steps_per_cpu_s": round(steps / cpu_s),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return outcomes.end_s


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--policy", nargs="+", default=["cache_aware", "round_robin"])
    parser.add_argument(
        "--off", type=int, default=5000, help="requests of the comparison with the off switch"
    )
    args = parser.parse_args()
    few = max(1, args.replicas // 20)
    on, off = (run(few, args.off, args.policy[0], skips=skips) for skips in (True, False))
    assert on == off
    for policy in args.policy:
        run(args.replicas, args.requests, policy, skips=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
