"""Compares sampling fused with the head against a head that writes all logits, followed by a
sampler.

    python benchmarks/kernels/bench_sample.py --width 896 --vocab 151936

Both draw the same tokens, which is checked. Runs are interleaved; reports medians, and the spread
of ratios of neighbouring runs. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sylvan.kernels import ops
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.native_rows import NativeSamplingRows
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 5 log probabilities": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "top-k": {"temperature": 0.7},
    "top-k, top-p 0.8": {"temperature": 0.7, "top_p": 0.8},
    "frequency penalty": {"temperature": 0.7, "frequency_penalty": 0.5},
}


class Head:
    """A head with random weights, whose logits are distributed like those of trained models."""

    def __init__(self, library: Library, width: int, vocab: int, most: int) -> None:
        self.vocab, self.library = vocab, library
        limits = ProgramLimits(max_tokens=1, max_outputs=most)
        tracer = NativeTracer(torch.bfloat16, limits, {}, library.constants)
        x = tracer.input(width, "bf16", "outputs")
        weight = (torch.randn(vocab, width) * 3 / width**0.5).bfloat16()
        self.logits = ops.linear(x, weight, None, out_f32=True)
        tracer.pin(self.logits)
        self.program = Program(library, compile_graph(tracer.graph))
        self.program.read(x, most).copy_(torch.randn(most, width))
        self.sampler = NativeSampler(library)

    def ways(
        self, rows: int, sampling: dict[str, Any], logprobs: LogprobOptions | None
    ) -> list[Callable[[], IntArray]]:
        """Return three functions: fused, one after the other, and the product alone."""
        batch = _batch(rows, self.vocab, sampling, logprobs)
        memory = self.program.read(self.logits, rows)
        mine = NativeSamplingRows(batch.params, rows)
        mine.call.read(memory.data_ptr(), memory.stride(0))
        mine.call.slots[:], mine.call.positions[:] = batch.slots, batch.positions
        mine.call.struct.rows = rows
        sampled = StepRun(outputs=rows, sample=ctypes.addressof(mine.call.struct))
        bare = StepRun(outputs=rows)

        def at_once() -> IntArray:
            mine.ready(batch.slots)
            return mine.output(batch.slots, self.program.run(sampled)).token_ids

        def alone() -> IntArray:
            self.program.run(bare)
            return batch.slots

        def apart() -> IntArray:
            self.program.run(bare)
            return self.sampler.sample(memory, batch).token_ids

        return [at_once, apart, alone]


def _batch(
    rows: int, vocab: int, sampling: dict[str, Any], logprobs: LogprobOptions | None
) -> SamplingBatch:
    params = SamplingSlots(rows, vocab)
    for slot in range(rows):
        request = GenerateRequest(
            rid=str(slot),
            input_ids=np.arange(3, dtype=np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(**{"sampling_seed": slot, **sampling}),
            logprobs=logprobs,
        )
        params.join(slot, request, np.arange(5, 300, dtype=np.int32))
    slots = np.arange(rows, dtype=np.int32)
    return SamplingBatch(slots, np.full(rows, 298, np.int64), params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=896, help="width of the head's input")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    library = load()
    library.dll.sylvan_threads(args.threads)
    head = Head(library, args.width, args.vocab, max(args.rows))
    print(f"head of {args.width} to {args.vocab}, bf16, {args.threads} threads; ms a step")
    print(f"{'':28} rows  product  + sampler  at once  ratio of the two, middle half")
    for name, base in CASES.items():
        sampling = base | ({"top_k": args.top_k} if "top-k" in name else {})
        logprobs = LogprobOptions(top=5) if "log probabilities" in name else None
        for rows in args.rows:
            ways = head.ways(rows, sampling, logprobs)
            assert (ways[0]() == ways[1]()).all(), "a draw depends on the way it is made"
            spent = [[_ms(way) for way in ways] for _ in range(args.turns)]
            at_once, apart, alone = (statistics.median(x) for x in zip(*spent, strict=True))
            ratios = [turn[0] / turn[1] for turn in spent]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{name:28} {rows:4} {alone:8.2f} {apart:10.2f} {at_once:8.2f}"
                f"  {middle:.2f} ({low:.2f} to {high:.2f})"
            )


def _ms(way: Callable[[], IntArray]) -> float:
    start = time.perf_counter()
    way()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
