"""Times one linear layer in each weight format, against torch and against reading its weights.

    python benchmarks/kernels/bench_linear.py --inputs 896 --outputs 9728

Cycles through enough copies that the weights come from memory. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight
from sylvan.kernels.matmul.codes import Code, bits_of
from sylvan.kernels.matmul.pack import pack
from sylvan.kernels.matmul.weights import CodedWeight, DeferredWeight, quantise_int4, quantise_int8
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.cost import read_rate
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import load
from sylvan.kernels.native.opset import Linear
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer

FORMATS: dict[str, Callable[[torch.Tensor], LinearWeight]] = {
    "bf16": lambda w: w.clone(),
    "w8a8": quantise_int8,
    "w4a8": lambda w: quantise_int4(w, 64),
    "w4a16 groups of 128": lambda w: _coded(w, "int4", 128, zeros=False),
    "w4a16 groups of 32": lambda w: _coded(w, "int4", 32, zeros=False),
    "w4a16 groups of 128 with zero points (AWQ, GPTQ)": lambda w: _coded(
        w, "int4", 128, zeros=True
    ),
    "w8a16 groups of 128": lambda w: _coded(w, "int8", 128, zeros=False),
    "fp8 in blocks of 128": lambda w: _coded(w, "fp8_e4m3", 128, zeros=False),
}


def _coded(weight: torch.Tensor, code: Code, group: int, *, zeros: bool) -> CodedWeight:
    """Return random codes in the shape of a weight; they do not affect a product's time."""
    rows, cols = weight.shape
    q = torch.randint(0, 120, (rows, cols * bits_of(code) // 8), dtype=torch.uint8)
    scale = torch.full((rows, cols // group), 0.01)
    scale = scale if code == "fp8_e4m3" else scale.half()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8) if zeros else None
    return CodedWeight(q, scale, code, group, zero)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=896)
    parser.add_argument("--outputs", type=int, default=9728)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant")
    parser.add_argument("--memory-mb", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load(args.variant)
    library.dll.sylvan_threads(args.threads)
    rate = read_rate(library)
    print(
        f"variant {library.variant}, {args.inputs} -> {args.outputs}, memory {rate / 1e9:.1f} GB/s"
    )
    weight = (torch.randn(args.outputs, args.inputs) * 0.05).bfloat16()
    for name, convert in FORMATS.items():
        program, copies, num_bytes = _program(library, weight, convert, args.memory_mb)
        for rows in (1, 8, 32, 512):
            spent = _median_us(program, rows) / copies
            work = 2 * rows * weight.numel() / spent / 1e3
            speed = num_bytes / spent / 1e3
            now = read_rate(library)  # it changes by the minute on shared machines
            print(
                f"{name} rows {rows}: {spent:.0f} us, {speed:.1f} GB/s, {work:.0f} G/s, "
                f"{num_bytes / now * 1e6 / spent:.2f} of the floor"
            )
    for rows in (1, 8, 32, 512):
        x = torch.randn(rows, args.inputs).bfloat16()
        spent = _time_us(lambda x=x: torch.nn.functional.linear(x, weight))
        print(f"torch bf16 rows {rows}: {spent:.0f} us")


def _program(library, weight, convert, memory_mb):
    """Linears over copies of the weight, all reading one input."""
    limits = ProgramLimits(max_tokens=512, max_outputs=1)
    tracer = NativeTracer(torch.bfloat16, limits, {}, library.constants)
    x = tracer.input(weight.shape[1], "bf16")
    each = pack(convert(weight), torch.bfloat16).num_bytes
    copies = -(-(memory_mb << 20) // each)
    for index in range(copies):
        ops.linear(x, DeferredWeight(weight.shape, lambda: convert(weight), str(index)))
    program = Program(library, compile_graph(tracer.graph))
    program.read(x, 512).copy_(torch.randn(512, weight.shape[1]))
    return program, copies, each


def _median_us(program: Program, rows: int) -> float:
    """Return the median microseconds of the linear layers alone, by the program's own clock."""
    runs = [program.profile(StepRun(tokens=rows)) for _ in range(6)][1:]
    return statistics.median(
        sum(ns for op, ns in run if isinstance(op, Linear)) / 1e3 for run in runs
    )


def _time_us(action: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
