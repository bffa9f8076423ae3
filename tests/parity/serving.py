"""The real scheduler, cache and executor around a checkpoint, in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sylvan.protocol.messages import Finish, TokenOutput
from sylvan.protocol.requests import GenerateRequest, LogprobOptions, ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import caches_by_rank, kv_cache
from sylvan.runtime.core.req import Req
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.facts import LoadedModelInfo
from sylvan.runtime.executor.options import ExecutorParts, LocalOptions, ModelContext
from sylvan.runtime.features.standard import standard_capabilities
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from tests.support.kv import check_memory
from tests.support.serving_store import ServingStore


def build_standard(path: Path, options: LocalOptions, **also) -> tuple[Executor, LoadedModelInfo]:
    """`build_executor` with the worker halves that every server has."""
    return build_executor(path, options, parts=ExecutorParts(STANDARD_WORKERS), **also)


class Serving:
    """`generate` runs requests to their end; nothing is shared between instances."""

    def __init__(
        self,
        model_dir: Path,
        *,
        pages: int = 100,
        page_size: int = 16,
        overlap: bool = False,
        runner: str = "eager",
        options: dict[str, object] | None = None,
        build: Callable[[Path, LocalOptions], tuple[Executor, LoadedModelInfo]] = build_standard,
        capabilities: tuple[Capability, ...] = (),
        preempt_every: int = 0,
        workers: Sequence[Callable[[ModelContext], CapabilityWorker | None]] = (),
        store: ServingStore | None = None,
        platform: Platform | None = None,
        **limits: object,
    ) -> None:
        """`workers`: halves of `capabilities`; `store`: below the device's memory."""
        if store is not None:
            workers = (*workers, store.worker)
        if workers:
            parts = ExecutorParts((*STANDARD_WORKERS, *workers))
            build = partial(build_executor, parts=parts, platform=platform)
        self._preempt_every = preempt_every  # steps
        self.limits = SchedulerLimits(
            **{"max_running_reqs": 8, "max_batch_tokens": 512, "inflight": 1 + overlap} | limits
        )
        self.executor, self.facts = build(
            model_dir,
            LocalOptions(
                **{
                    "page_size": page_size,
                    "num_pages": pages + 1,
                    "max_batch_tokens": self.limits.max_batch_tokens,
                    "max_running_reqs": self.limits.max_running_reqs,
                    "max_samples": 64,
                    "overlap": overlap,
                    "runner": runner,
                }
                | (options or {})
            ),
        )
        prefix = "none" if self.executor.caps.bidirectional else "radix"
        below = store.below(self.executor.caps) if store is not None else ((), None)
        caps = self.executor.caps
        if caps.attention_dp > 1:
            self.cache = caches_by_rank(caps.kv_groups, caps.attention_dp, prefix, "lru")
        else:
            self.cache = kv_cache(caps.kv_groups, prefix, "lru", *below)
        if store is not None:
            capabilities = (*capabilities, store.control(self.cache))
        self.scheduler = Scheduler(
            SchedulerDeps(
                cache=self.cache,
                executor=self.executor,
                policy=schedule_policy("fcfs"),
                emit=self._emit,
                capabilities=(
                    *standard_capabilities(
                        self.cache,
                        makes_vectors=self.executor.caps.makes_vectors,
                        pools_all=self.executor.caps.pools_all,
                    ),
                    *capabilities,
                ),
            ),
            self.limits,
        )
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.finish: dict[str, Finish] = {}
        self._count = 0

    def close(self) -> None:
        self.executor.close()

    def add(
        self,
        prompt: Sequence[int],
        *,
        outputs: Sequence[int] = (),
        logprobs: LogprobOptions | None = None,
        sample: int = 0,
        priority: int = 0,
        eos_ids: tuple[int, ...] = (),
        thinking: ThinkingOptions | None = None,
        lora: str | None = None,
        **sampling: object,
    ) -> str:
        self._count += 1
        rid = f"r{self._count}"
        params = {"temperature": 0.0, "max_new_tokens": 16, "sampling_seed": 1} | sampling
        self.scheduler.add(
            GenerateRequest(
                rid=rid,
                input_ids=np.array(prompt, np.int32),
                output_ids=np.array(outputs, np.int32),
                sampling=SamplingParams(**params),
                sample=sample,
                priority=priority,
                eos_ids=eos_ids,
                logprobs=logprobs,
                thinking=thinking,
                lora=lora,
            )
        )
        return rid

    def run(self) -> None:
        for number in range(1, 5001):
            if self._preempt_every and number % self._preempt_every == 0:
                self.scheduler.pause("retract")  # windows alone may leave room for all
                self.scheduler.resume()
            if self.scheduler.step():
                continue
            if self.scheduler.idle:
                check_memory(self.scheduler, self.cache)
                return
            time.sleep(0.0002)  # threads move KV
        raise AssertionError("not done after 5000 steps")

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: object) -> list[list[int]]:
        rids = [self.add(prompt, **sampling) for prompt in prompts]
        self.run()
        assert not {r: f for r in rids if (f := self.finish[r]).type == "abort"}
        return [self.tokens[rid] for rid in rids]

    def _cached_tokens(self, req: Req) -> int:
        return self.scheduler.cached_tokens(req)

    def _emit(self, outputs: Sequence[TokenOutput]) -> None:
        for out in outputs:
            self.tokens.setdefault(out.rid, []).extend(out.token_ids)
            self.outputs.setdefault(out.rid, []).append(out)
            if out.finish:
                self.finish[out.rid] = out.finish
