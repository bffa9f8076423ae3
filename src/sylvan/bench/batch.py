"""Times the steps of one batch: only the model, without scheduler, cache and HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.step import NO_PAGES, Join, StepPlan
from sylvan.runtime.executor.api import Executor

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch of identical requests.

    Attributes:
        size: Number of requests.
        input_tokens: Length of each prompt.
        output_tokens: Tokens to generate.
    """

    size: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """One run of a batch.

    Attributes:
        prefill_s: Seconds for all prompts.
        decode_s: Seconds of each decode step.
        tokens: Output tokens of each request; the first one comes from the prefill.
    """

    prefill_s: float
    decode_s: Sequence[float]
    tokens: Sequence[Sequence[int]]


class BatchBench:
    """Runs batches on an executor that is not shared.

    Args:
        executor: Executor of the model.
        vocab_size: Upper bound of random prompt IDs.
        context_len: Largest number of tokens of a request.
        seed: Seed of the prompts.
        clock: Clock for durations.

    Attributes:
        prompts: Prompts of the last run, (size, input_tokens).

    Raises:
        ConfigError: The model has recurrent states, or does not generate.
    """

    def __init__(
        self,
        executor: Executor,
        vocab_size: int,
        context_len: int,
        *,
        seed: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        caps = executor.caps
        if any(group.kind == "state" for group in caps.kv_groups):
            message = "bench batch: the model has recurrent states, which need a scheduler"
            raise ConfigError(f"{message}; use sylvan bench offline")
        if caps.makes_vectors:
            raise ConfigError("bench batch: the model embeds texts, and generates none")
        self._executor = executor
        self._vocab_size = vocab_size
        self._context_len = context_len
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self.prompts: IntArray = np.empty((0, 0), np.int32)
        self._steps = 0
        self._slots: list[int] = []  # slots used by the last batch

    def check(self, shape: BatchShape) -> None:
        """Reject a batch that does not fit.

        Raises:
            ConfigError: Names the setting.
        """
        caps = self._executor.caps
        tokens = shape.input_tokens + shape.output_tokens
        if tokens > self._context_len:
            raise ConfigError(
                f"batch.input_tokens: {shape.input_tokens} tokens and {shape.output_tokens} of "
                f"output are more than the context of {self._context_len}"
            )
        if shape.size > caps.max_running_reqs:
            raise ConfigError(
                f"batch.sizes: {shape.size} requests; scheduler.max_running_reqs is "
                f"{caps.max_running_reqs}"
            )
        for group in caps.kv_groups:
            needed = shape.size * _pages(shape, group.page_size)
            if needed >= group.num_pages:  # page 0 is padding
                raise ConfigError(
                    f"batch.sizes: {shape.size} x {tokens} tokens take {needed} pages, and the KV "
                    f"cache has {group.num_pages - 1} ({group.name}); raise cache.max_tokens"
                )

    def run(self, shape: BatchShape) -> TimedBatch:
        """Prefill a batch, then decode its outputs step by step.

        Raises:
            ExecutorError: A step failed.
        """
        size, length = shape.size, shape.input_tokens
        prompts = self.prompts = self._rng.integers(0, self._vocab_size, (size, length), np.int32)
        tokens: list[list[int]] = [[] for _ in range(size)]
        began_s = self._clock()
        for plan in self._prefill(shape, prompts):
            result = self._executor.launch(plan).wait()
            for slot, sampled in zip(plan.slots.tolist(), result.outputs, strict=True):
                tokens[slot] += sampled.token_ids
        prefill_s = self._clock() - began_s
        decode_s: list[float] = []
        for position in range(length, length + shape.output_tokens - 1):
            began_s = self._clock()
            result = self._executor.launch(self._decode(size, position)).wait()
            decode_s.append(self._clock() - began_s)
            for known, token in zip(tokens, result.tokens, strict=True):
                known.append(token)
        return TimedBatch(prefill_s, decode_s, tokens)

    def _prefill(self, shape: BatchShape, prompts: IntArray) -> Iterator[StepPlan]:
        most = self._executor.caps.max_batch_tokens
        step: list[tuple[int, int, int]] = []
        room, first = most, True
        for slot in range(shape.size):
            start = 0
            while start < shape.input_tokens:
                stop = min(shape.input_tokens, start + room)
                step.append((slot, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield self._chunk(step, shape, prompts, first=first)
                    step, room, first = [], most, False
        if step:
            yield self._chunk(step, shape, prompts, first=first)

    def _chunk(
        self, step: list[tuple[int, int, int]], shape: BatchShape, prompts: IntArray, *, first: bool
    ) -> StepPlan:
        slots, starts, stops = (np.array(part, np.int32) for part in zip(*step, strict=True))
        samples = np.flatnonzero(stops == shape.input_tokens).astype(np.int32)
        ids = np.concatenate([prompts[slot, start:stop] for slot, start, stop in step])
        numbers = np.concatenate([slots, starts, stops, samples, ids], dtype=np.int32)
        leaves: list[int] = []
        joins: list[Join] = []
        if first:
            leaves, self._slots = self._slots, list(range(shape.size))
            joins = [Join(slot, _request(prompts[slot], shape), EMPTY_IDS) for slot in self._slots]
        return StepPlan(
            number=self._next(),
            num_slices=len(step),
            num_tokens=len(ids),
            num_samples=len(samples),
            num_in_flight=0,
            numbers=numbers,
            leaves=leaves,
            joins=joins,
            pages=self._tables(shape) if first else NO_PAGES,
        )

    def _decode(self, size: int, position: int) -> StepPlan:
        slots = np.arange(size, dtype=np.int32)
        starts = np.full(size, position, np.int32)
        parts = [slots, starts, starts + 1, slots, slots, slots, np.zeros(size, np.int32)]
        return StepPlan(
            number=self._next(),
            num_slices=size,
            num_tokens=size,
            num_samples=size,
            num_in_flight=size,
            numbers=np.concatenate(parts, dtype=np.int32),
        )

    def _tables(self, shape: BatchShape) -> IntArray:
        """Return consecutive pages for all requests, from page 1 on."""
        tables: list[IntArray] = []
        for number, group in enumerate(self._executor.caps.kv_groups):
            count = _pages(shape, group.page_size)
            table = np.empty((4, shape.size * count), np.int32)
            table[0] = number
            table[1] = np.repeat(np.arange(shape.size), count)
            table[2] = np.tile(np.arange(count), shape.size)
            table[3] = np.arange(1, shape.size * count + 1)
            tables.append(table)
        return np.concatenate(tables, axis=1) if tables else NO_PAGES

    def _next(self) -> int:
        self._steps += 1
        return self._steps


def figures(shape: BatchShape, runs: Sequence[TimedBatch]) -> dict[str, Any]:
    """Return medians over the runs, under the names of SGLang's `bench_one_batch`."""
    prefill_s = statistics.median(run.prefill_s for run in runs)
    steps = [second for run in runs for second in run.decode_s]
    total_s = statistics.median(run.prefill_s + sum(run.decode_s) for run in runs)
    found: dict[str, Any] = {
        "batch_size": shape.size,
        "input_len": shape.input_tokens,
        "output_len": shape.output_tokens,
        "prefill_latency": prefill_s,
        "prefill_throughput": shape.size * shape.input_tokens / prefill_s,
        "total_latency": total_s,
        "overall_throughput": shape.size * (shape.input_tokens + shape.output_tokens) / total_s,
        "prefill_latencies": [run.prefill_s for run in runs],
    }
    if steps:
        decode_s = statistics.median(steps)
        found["median_decode_latency"] = decode_s
        found["median_decode_throughput"] = shape.size / decode_s
        found["p99_decode_latency"] = float(np.percentile(steps, 99))
    return found


def _pages(shape: BatchShape, page_size: int) -> int:
    return -(-(shape.input_tokens + shape.output_tokens) // page_size)


def _request(prompt: IntArray, shape: BatchShape) -> GenerateRequest:
    sampling = SamplingParams(
        max_new_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0
    )
    return GenerateRequest(rid="batch", input_ids=prompt, output_ids=EMPTY_IDS, sampling=sampling)
