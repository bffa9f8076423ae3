"""Measures decoding and prefill of real model shapes through the scheduler, against hardware
limits.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from attention import PAGE
from kernels import Bench, Ceilings
from shapes import Shape

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts, LocalOptions
from sylvan.runtime.features.standard import standard_capabilities
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler

MAX_BATCH, MAX_TOKENS = 256, 8192
_STEPS = 32
_SLOW = 0.3  # of the GEMM rate: prompts are expected to be no slower
_MOST = 1 / 6  # of the time left, that one case may take


@dataclass(frozen=True)
class Way:
    """Which optimisations are on; ablations switch them off."""

    graphs: bool = True
    overlap: bool = True
    radix: bool = True


class Served:
    """A model with random weights, and a scheduler."""

    def __init__(
        self,
        bench: Bench,
        path: Path,
        way: Way,
        *,
        context: int,
        pages: int,
        real: bool = False,
    ) -> None:
        """`real`: the checkpoint has weights, and is small."""
        tokens, reqs = (128, 4) if bench.tiny or real else (MAX_TOKENS, MAX_BATCH)
        small = bench.tiny or real
        self.context, self._max_tokens = context, tokens
        start = time.perf_counter()
        cpu = bench.device.type == "cpu"
        self.executor, self.facts = build_executor(
            path,
            LocalOptions(
                page_size=16 if small else PAGE,
                num_pages=pages,
                max_batch_tokens=tokens,
                max_running_reqs=reqs,
                context_len=context,
                dtype="float32" if cpu else "auto",  # of the checkpoint
                device=bench.platform.facts.name,
                fill=not cpu and not small,
                attention="dense" if cpu else "auto",
                runner="auto" if way.graphs else "eager",
                load_format="safetensors" if real else "dummy",
            ),
            parts=ExecutorParts(STANDARD_WORKERS),
            platform=bench.platform,
        )
        self.start_s = time.perf_counter() - start
        prefix = "radix" if way.radix else "none"
        self.given = 0
        self.tokens: dict[str, list[int]] = {}
        cache = kv_cache(self.executor.caps.kv_groups, prefix, "lru")
        parts = SchedulerDeps(
            cache=cache,
            capabilities=standard_capabilities(cache),
            executor=self.executor,
            policy=schedule_policy("fcfs"),
            emit=self._count,
        )
        limits = SchedulerLimits(
            max_batch_tokens=tokens,
            max_running_reqs=reqs,
            chunk_tokens=tokens,
            inflight=2 if way.overlap else 1,
        )
        self.scheduler = Scheduler(parts, limits)
        self._number = 0
        self._rng = np.random.default_rng(0)

    @property
    def room(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.scheduler.load().max_total_num_tokens

    def prompt(self, length: int) -> np.ndarray:
        return self._rng.integers(1, 300, length, np.int32)

    def add(self, prompt: np.ndarray, new: int) -> str:
        """Add a request; return the ID under which its tokens are found."""
        self._number += 1
        sampling = SamplingParams(
            max_new_tokens=new, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        self.scheduler.add(
            GenerateRequest(
                rid=str(self._number), input_ids=prompt, output_ids=EMPTY_IDS, sampling=sampling
            )
        )
        return str(self._number)

    def run(self) -> float:
        """Run until all requests have ended; return the seconds."""
        start = time.perf_counter()
        while self.scheduler.step() or not self.scheduler.idle:
            pass
        return time.perf_counter() - start

    def new_tokens(self, batch: int, context: int, steps: int) -> int:
        """Return an output length such that no request ends within `steps` decode steps of the
        whole batch.
        """
        chunk = max(1, self._max_tokens - batch)
        return steps + 8 + 2 * (batch * context // chunk + 1)

    def decode_s(self, batch: int, context: int, steps: int) -> tuple[float, float]:
        """Return the seconds of a decode step of `batch` requests of `context` tokens, and their
        mean length.
        """
        new = self.new_tokens(batch, context, steps)
        rids = [self.add(self.prompt(context), new) for _ in range(batch)]
        while any(rid not in self.tokens for rid in rids):  # prompts; the first decode meanwhile
            self.scheduler.step()
        for _ in range(3):
            self.scheduler.step()
        before, start = self.given, time.perf_counter()
        while self.given < before + batch * steps:
            self.scheduler.step()
            assert not self.scheduler.idle, "requests ended too early"
        seconds = (time.perf_counter() - start) * batch / (self.given - before)
        length = context + (before + self.given) / 2 / batch
        self.scheduler.abort_all()
        self.run()
        self.given = 0
        self.tokens.clear()
        self.scheduler.flush_cache()
        return seconds, length

    def _count(self, outputs: Sequence) -> None:
        self.given += sum(len(out.token_ids) for out in outputs)
        for out in outputs:
            self.tokens.setdefault(out.rid, []).extend(out.token_ids)

    def close(self) -> None:
        self.executor.close()


def serve(bench: Bench, folder: Path, shape: Shape, way: Way = Way()) -> Served:
    path = shape.write(folder / shape.name)
    gc.collect()  # an earlier error may still hold the memory
    bench.platform.trim()
    context, pages = (96, 64) if bench.tiny else (40960, 4096)
    return Served(bench, path, way, context=context, pages=pages)


def release(bench: Bench, served: Served) -> None:
    """Forget a model, so that the next one has the memory."""
    served.close()
    served.__dict__.clear()
    gc.collect()
    bench.platform.trim()


def measure(bench: Bench, top: Ceilings, folder: Path, shapes: Iterable[Shape]) -> None:
    for shape in shapes:
        with bench.report.part(f"engine: {shape.name}", bench.needs(25)) as go:
            if go:
                served = serve(bench, folder, shape)
                bench.report.add("engine", f"{shape.name}: loaded, warmed up", served.start_s, "s")
                try:
                    _decode(bench, top, shape, served)
                    _prefill(bench, top, shape, served)
                finally:
                    release(bench, served)


def active_bytes(shape: Shape, served: Served, batch: int) -> float:
    """Return the weight bytes that a step of `batch` rows reads; counts the experts that are
    expected to be hit.
    """
    config, facts = shape.config, served.facts
    item = 4 if facts.dtype == "float32" else 2
    embed = int(config["vocab_size"]) * int(config["hidden_size"]) * item
    tied = bool(config["tie_word_embeddings"])
    read = facts.num_parameters * item - (0 if tied else embed)
    if experts := int(config.get("num_experts", 0)):
        each = 3 * int(config["hidden_size"]) * int(config["moe_intermediate_size"]) * item
        share = int(config["num_experts_per_tok"]) / experts
        missed = (1 - share) ** batch
        read -= int(config["num_hidden_layers"]) * experts * each * missed
    return read


def active_numbers(shape: Shape, served: Served) -> float:
    """Return the weights that multiply one prompt token, without embedding and head."""
    config = shape.config
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    tables = 1 if config["tie_word_embeddings"] else 2
    numbers = served.facts.num_parameters - tables * int(config["vocab_size"]) * hidden
    if experts := int(config.get("num_experts", 0)):
        idle = experts - int(config["num_experts_per_tok"])
        numbers -= layers * idle * 3 * hidden * int(config["moe_intermediate_size"])
    return numbers


def prompt_work(shape: Shape, served: Served, length: int) -> float:
    """Return the operations of a prompt, including attention to its own tokens."""
    config = shape.config
    attention = 2 * length**2 * int(config["num_attention_heads"]) * int(config["head_dim"])
    work = 2 * active_numbers(shape, served) * length
    return work + attention * int(config["num_hidden_layers"])


def _has_time(bench: Bench, name: str, work: float, top: Ceilings) -> bool:
    """Whether this many operations fit into a share of the remaining time."""
    return bench.report.fits(name, 0.0 if bench.tiny else work / (_SLOW * top.gemm) / _MOST)


def _decode(bench: Bench, top: Ceilings, shape: Shape, served: Served) -> None:
    cases = [(1, 32), (2, 32)]
    if not bench.tiny:
        cases = [(b, c) for c in (1024, 8192) for b in (1, 8, 64, 256)]
    for batch, context in cases:
        steps = 4 if bench.tiny else _STEPS
        name = f"{shape.name}: decode {batch} x {context}"
        needed = batch * (context + served.new_tokens(batch, context, steps))
        if needed > served.room:
            bench.report.skip(name, f"{needed} tokens of KV, and there is room for {served.room}")
            continue
        if not _has_time(bench, name, batch * prompt_work(shape, served, context), top):
            continue
        seconds, length = served.decode_s(batch, context, steps)
        kv = batch * length * served.facts.kv_bytes_per_token
        floor = (active_bytes(shape, served, batch) + kv) / top.copy
        bench.report.add(
            "decode",
            f"{shape.name}: batch {batch}, context {context}",
            seconds * 1e3,
            "ms",
            floor=floor * 1e3,
            share=floor / seconds,
            note=f"{batch / seconds:.0f} tokens/s",
        )


def _prefill(bench: Bench, top: Ceilings, shape: Shape, served: Served) -> None:
    for length in (64,) if bench.tiny else (2048, 8192, 32768):
        work = prompt_work(shape, served, length)
        if not _has_time(bench, f"{shape.name}: prefill {length}", 2 * work, top):
            continue
        served.add(served.prompt(length), 1)
        served.run()
        served.scheduler.flush_cache()
        served.add(served.prompt(length), 1)
        seconds = served.run()
        served.scheduler.flush_cache()
        floor = work / top.gemm
        bench.report.add(
            "prefill",
            f"{shape.name}: {length} tokens",
            seconds * 1e3,
            "ms",
            floor=floor * 1e3,
            share=floor / seconds,
            note=f"{length / seconds:.0f} tokens/s",
        )


def ablations(bench: Bench, folder: Path, shape: Shape) -> None:
    """Measure the gains by graphs, overlap and the radix cache."""
    whole = Way()
    batch, context = (2, 32) if bench.tiny else (64, 512)
    for name, way, count in (
        ("graphs", replace(whole, graphs=False), 1),
        ("overlap", replace(whole, overlap=False), batch),
    ):
        if not bench.report.fits(f"ablation: {name}", bench.needs(20)):
            continue
        times, prompts = [], []
        for each in (way, whole):
            served = serve(bench, folder, shape, each)
            times.append(served.decode_s(count, context, 4 if bench.tiny else 64)[0])
            prompts.append(min(_prompt_s(served, context // 2) for _ in range(3)))
            release(bench, served)
        what = f"{shape.name}: {name} on over off, batch {count}"
        bench.report.add("ablation", what, times[0] / times[1], "x")
        what = f"{shape.name}: {name} on over off, a prompt of {context // 2}"
        bench.report.add("ablation", what, prompts[0] / prompts[1], "x")
    if not bench.report.fits("ablation: radix", bench.needs(20)):
        return
    times = []
    for way in (replace(whole, radix=False), whole):
        served = serve(bench, folder, shape, way)
        shared = served.prompt(context)
        for _ in range(batch):
            served.add(np.concatenate([shared, served.prompt(8)]), 2 if bench.tiny else 16)
        times.append(served.run())
        release(bench, served)
    what = f"{shape.name}: radix on over off, {batch} prompts that share"
    bench.report.add("ablation", what, times[0] / times[1], "x")


def _prompt_s(served: Served, length: int) -> float:
    served.add(served.prompt(length), 1)
    seconds = served.run()
    served.scheduler.flush_cache()
    return seconds


def no_waiting(bench: Bench, folder: Path, shape: Shape) -> None:
    """Check that a decode step is launched without a call that waits for the device."""
    served = serve(bench, folder, shape)
    launch = served.executor.launch

    def guarded(batch):
        steady = bool((batch.stops - batch.starts == 1).all())
        if not (steady and batch.num_slices):
            return launch(batch)
        with bench.platform.unsynced():
            return launch(batch)

    served.executor.launch = guarded
    for _ in range(2):
        served.add(served.prompt(20), 8)
    served.run()
    served.executor.launch = None  # it holds the executor, and the executor it
    bench.report.add(
        "check", "steps launched without waiting", float(served.given == 16), "(1: yes)"
    )
    release(bench, served)


def memory_note(bench: Bench) -> None:
    if bench.device.type == "cuda":
        most = torch.cuda.max_memory_allocated() / 2**30
        bench.report.add("machine", "largest memory in use", most, "GiB")
