"""Claims: prefix reuse turns saved tokens into saved time, and costs nothing without reuse.

The engine also leaves few gaps between forward passes (`bubble`).

    python benchmarks/scheduler/bench_reuse.py [--model sapling|M] [--only few_shot ...]

Each pair (on, off) runs interleaved; medians and spreads are of `--repeats` runs. Run it on a quiet
machine. The engine is the real one, in this process, without HTTP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.sim import SimExecutor
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.utils import garbage

SHAPE_M = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text()) | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


Model = dict[str, object]


@dataclass
class Run:
    """Costs of one run of a workload."""

    seconds: float
    computed: int
    generated: int
    forward_s: float = 0.0  # in native calls: forward passes with their inputs and sampling
    first_token_s: dict[str, float] = field(default_factory=dict)


class Engine:
    """Scheduler and executor of a configuration, stepped by the benchmark."""

    def __init__(self, model: Model, *, prefix: str) -> None:
        keywords = {**model, "cache__prefix": prefix, "log_level": "warning"}
        self._arrived: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._ended: set[str] = set()
        config = gather(from_keywords(keywords)).config
        self.built = build_scheduler(config, self._emit)
        self.scheduler = self.built.scheduler
        self._forward_s = 0.0
        program = self.built.scheduler._parts.executor._worker._backend._fused._program
        program.run = self._timed(program.run)
        garbage.freeze()  # as a scheduler process does at start-up

    def _timed(self, call):
        def run(step):
            start = time.perf_counter()
            try:
                return call(step)
            finally:
                self._forward_s += time.perf_counter() - start

        return run

    def _emit(self, outputs) -> None:
        now = time.perf_counter()
        for out in outputs:
            if out.token_ids and out.rid not in self._first:
                self._first[out.rid] = now
            if out.finish:
                self._ended.add(out.rid)

    def add(self, rid: str, ids: np.ndarray, outputs: int) -> None:
        self._first.pop(rid, None)  # of the run before
        self._arrived[rid] = time.perf_counter()
        sampling = SamplingParams(
            max_new_tokens=outputs, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        self.scheduler.add(
            GenerateRequest(rid=rid, input_ids=ids, output_ids=EMPTY_IDS, sampling=sampling)
        )

    def ttft(self, rid: str) -> float:
        return self._first[rid] - self._arrived[rid]

    def run(self, work: Iterable[tuple[str, np.ndarray, int]]) -> Run:
        before = self.scheduler.load()
        self._forward_s = 0.0
        start = time.perf_counter()
        for rid, ids, outputs in work:
            self.add(rid, ids, outputs)
        while not self.scheduler.idle:
            self.scheduler.step()
        seconds = time.perf_counter() - start
        after = self.scheduler.load()
        assert self.scheduler.flush_cache()
        return Run(
            seconds,
            after.computed_tokens - before.computed_tokens,
            after.generated_tokens - before.generated_tokens,
            self._forward_s,
        )

    def close(self) -> None:
        self.built.close()


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def paired(model: Model, repeats: int, one: Callable[[Engine], Run]) -> dict[str, list[Run]]:
    engines = {p: Engine(model, prefix=p) for p in ("radix", "none")}
    runs: dict[str, list[Run]] = {p: [] for p in engines}
    for _ in range(repeats + 1):
        for name, engine in engines.items():
            runs[name].append(one(engine))
    for engine in engines.values():
        engine.close()
    return {name: r[1:] for name, r in runs.items()}  # the first warms up


def few_shot(model: Model, repeats: int) -> dict[str, object]:
    """Measure a shared prefix of 1024 tokens, 64 questions of 16-64 tokens, 1 and 8 outputs.

    A token behind a shared prefix attends to all of it, so it costs more than the average token of
    a run without sharing; the predicted ratio is therefore that of the times of the forward passes.
    """
    results: dict[str, object] = {}
    for outputs in (1, 8):
        rng = np.random.default_rng(0)
        shots = rng.integers(0, 4000, 1024, np.int32)
        work = [
            (str(i), np.concatenate([shots, rng.integers(0, 4000, rng.integers(16, 65), np.int32)]))
            for i in range(64)
        ]
        runs = paired(model, repeats, lambda e, w=work, o=outputs: e.run((r, i, o) for r, i in w))
        on, off = runs["radix"], runs["none"]
        tokens = off[0].computed / on[0].computed
        times = [b.seconds / a.seconds for a, b in zip(on, off, strict=True)]
        costs = [b.forward_s / a.forward_s for a, b in zip(on, off, strict=True)]
        results[f"{outputs} outputs"] = {
            "computed_tokens": {"on": on[0].computed, "off": off[0].computed},
            "token_ratio": round(tokens, 3),
            "throughput_ratio": spread(times),
            "share_of_token_ratio": round(statistics.median(times) / tokens, 3),
            "predicted_by_forward_costs": spread(costs),
            "share_of_predicted": round(statistics.median(times) / statistics.median(costs), 3),
        }
    return results


def multi_turn(model: Model, repeats: int) -> dict[str, object]:
    """Measure chats of Zipf-distributed users: median time to the first token of a turn."""

    def one(engine: Engine) -> Run:
        rng = np.random.default_rng(1)
        histories: dict[int, np.ndarray] = {}
        first: list[float] = []
        start = time.perf_counter()
        for turn in range(120):
            user = int(min(rng.zipf(1.3), 20))
            said = rng.integers(0, 4000, rng.integers(30, 90), np.int32)
            past = histories.get(user, rng.integers(0, 4000, 200, np.int32))
            ids = np.concatenate([past, said])[-1500:]
            engine.add(str(turn), ids, 16)
            while not engine.scheduler.idle:
                engine.scheduler.step()
            first.append(engine.ttft(str(turn)))
            histories[user] = ids
        p50 = {"p50": statistics.median(first)}
        run = Run(time.perf_counter() - start, 0, 0, first_token_s=p50)
        assert engine.scheduler.flush_cache()
        return run

    runs = paired(model, repeats, one)
    on = [r.first_token_s["p50"] for r in runs["radix"]]
    off = [r.first_token_s["p50"] for r in runs["none"]]
    return {
        "ttft_p50_ms": {"on": spread([t * 1e3 for t in on]), "off": spread([t * 1e3 for t in off])},
        "ratio": spread([b / a for a, b in zip(on, off, strict=True)]),
    }


def no_sharing(repeats: int) -> dict[str, object]:
    """Measure long outputs without sharing: scheduler CPU seconds per token, radix on over off.

    The cache has a cost per request, so its share falls with longer outputs.
    """
    return {f"{outputs} outputs": _no_sharing(repeats, outputs) for outputs in (512, 2048, 4096)}


def _no_sharing(repeats: int, outputs: int) -> dict[str, object]:
    """Step both schedulers alternately, so that load on the machine affects both alike."""
    ratios, us, extra = [], [], []
    for seed in range(max(10, 3 * repeats)):
        both = {prefix: _chats(prefix, seed, outputs) for prefix in ("radix", "none")}
        garbage.freeze()  # as a scheduler process does at start-up
        took = dict.fromkeys(both, 0.0)
        turn = list(both)
        while not all(scheduler.idle for scheduler in both.values()):
            turn.reverse()
            for prefix in turn:
                start = time.thread_time()
                both[prefix].step()
                took[prefix] += time.thread_time() - start
        counts = {prefix: one.load().generated_tokens for prefix, one in both.items()}
        assert len(set(counts.values())) == 1
        ratios.append(took["radix"] / took["none"])
        us.append(took["radix"] / counts["radix"] * 1e6)
        extra.append((took["radix"] - took["none"]) / counts["radix"] * 1e6 * outputs)
    mean = statistics.mean(ratios)
    half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {
        "cpu_us_per_token": spread(us),
        "cpu_us_more_per_request": spread(extra),
        "on_over_off": round(mean, 4),
        "confidence_95": [round(mean - half, 4), round(mean + half, 4)],
    }


def _chats(prefix: str, seed: int, outputs: int) -> Scheduler:
    """Return a scheduler with 128 requests with distinct prompts, 64 of which run concurrently."""
    rng = np.random.default_rng(seed)
    pages = max(4000, 2 * outputs)
    groups = [KVGroup(name="full", kind="full", num_pages=pages, page_size=64)]
    executor = SimExecutor(
        lambda req, at: at % 97,
        lambda batch: 0.0,
        ExecutorCaps(max_batch_tokens=8192, max_running_reqs=64),
    )
    parts = SchedulerDeps(
        cache=kv_cache(groups, prefix, "lru"),
        executor=executor,
        policy=schedule_policy("lpm" if prefix == "radix" else "fcfs"),
        emit=lambda outputs: None,
    )
    scheduler = Scheduler(parts, SchedulerLimits(max_running_reqs=64))
    for i in range(128):
        scheduler.add(
            GenerateRequest(
                rid=str(i),
                input_ids=rng.integers(0, 50_000, 200, np.int32),
                output_ids=EMPTY_IDS,
                sampling=SamplingParams(max_new_tokens=outputs, sampling_seed=0),
            )
        )
    return scheduler


def bubble(model: Model, repeats: int) -> dict[str, object]:
    """Decode 32 requests: share of wall time in which no forward pass ran."""
    shares = []
    for _ in range(repeats):
        engine = Engine(model, prefix="radix")
        rng = np.random.default_rng(0)
        work = [(str(i), rng.integers(0, 4000, 64, np.int32), 128) for i in range(32)]
        engine.run(work[:4])
        run = engine.run((f"x{r}", i, o) for r, i, o in work)
        shares.append(1 - run.forward_s / run.seconds)
        engine.close()
    return {"idle_share": spread(shares)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model: Model = {"model": args.model, "max_total_tokens": 65_536}
        if args.model == "M":
            (Path(folder) / "config.json").write_text(json.dumps(SHAPE_M))
            model = {
                "model": folder,
                "load_format": "dummy",
                "max_total_tokens": 65_536,
            }
        parts: dict[str, Callable[[], dict[str, object]]] = {
            "few_shot": lambda: few_shot(model, args.repeats),
            "multi_turn": lambda: multi_turn(model, args.repeats),
            "no_sharing": lambda: no_sharing(args.repeats),
            "bubble": lambda: bubble(model, args.repeats),
        }
        for name, part in parts.items():
            if not args.only or name in args.only:
                print(json.dumps({name: part(), "model": args.model}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
