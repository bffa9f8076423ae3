"""Times one linear layer in each weight format, against torch and against reading its weights.

    python benchmarks/kernels/bench_linear.py --inputs 896 --outputs 9728
    python benchmarks/kernels/bench_linear.py --only Q4_0 Q8_0 --rows 1 --against LIB

Cycles through enough copies that the weights come from memory. LIB is `src/sylvan/kernels/lib` of
another checkout, whose kernels then read the same weights in turns with these: the ratio of times
says which are faster, although the rate of the memory may change. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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
from sylvan.kernels.native.layout import ProgramLayout
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.opset import Linear
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer

FORMATS: dict[str, Callable[[torch.Tensor], LinearWeight]] = {
    "bf16": lambda w: w.clone(),
    "w8a8": quantise_int8,
    "w4a8": lambda w: quantise_int4(w, 64),
    "w4a16 groups of 128": lambda w: _coded(w, "int4", 128, zeros=False),
    "w4a16 groups of 32 (Q4_0)": lambda w: _coded(w, "int4", 32, zeros=False),
    "w4a16 groups of 128 with zero points (AWQ, GPTQ)": lambda w: _coded(
        w, "int4", 128, zeros=True
    ),
    "w8a16 groups of 32 (Q8_0)": lambda w: _coded(w, "int8", 32, zeros=False),
    "w8a16 groups of 128": lambda w: _coded(w, "int8", 128, zeros=False),
    "fp8 in blocks of 128": lambda w: _coded(w, "fp8_e4m3", 128, zeros=False),
}
# for inputs in whole blocks of 256
K_QUANTS: dict[str, Callable[[torch.Tensor], LinearWeight]] = {
    "Q4_K": lambda w: _k_quant(w, "uint4", 32, shifts=True),
    "Q4_K with float32 scales": lambda w: _k_quant(w, "uint4", 32, shifts=True).for_devices(),
    "Q6_K": lambda w: _k_quant(w, "int6", 16, shifts=False),
    "Q6_K with 8 bits and float32 scales": lambda w: _k_quant(
        w, "int6", 16, shifts=False
    ).for_devices(),
}


def _coded(weight: torch.Tensor, code: Code, group: int, *, zeros: bool) -> CodedWeight:
    """Return random codes in the shape of a weight; they do not affect a product's time."""
    rows, cols = weight.shape
    q = torch.randint(0, 120, (rows, cols * bits_of(code) // 8), dtype=torch.uint8)
    scale = torch.full((rows, cols // group), 0.01)
    scale = scale if code == "fp8_e4m3" else scale.half()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8) if zeros else None
    return CodedWeight(q, scale, code, group, zero)


def _k_quant(weight: torch.Tensor, code: Code, group: int, *, shifts: bool) -> CodedWeight:
    """The same with steps of scales."""
    rows, cols = weight.shape
    most = 64 if code == "int6" else 256
    q = torch.randint(0, most, (rows, cols * bits_of(code) // 8), dtype=torch.uint8)
    scale = torch.randint(0, 64, (rows, cols // group), dtype=torch.int8)
    step = torch.full((rows, cols // 256), 1e-4).half()
    made = CodedWeight(q, scale, code, group, step=step)
    return replace(made, shift=scale, shift_step=step) if shifts else made


ROWS, ROUNDS = (1, 8, 32, 512), 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=896)
    parser.add_argument("--outputs", type=int, default=9728)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant")
    parser.add_argument("--memory-mb", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", nargs="+", default=[""], help="formats whose names contain one")
    parser.add_argument("--against", type=Path, help="compiled kernels of another checkout")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load(args.variant)
    library.dll.sylvan_threads(args.threads)
    rate = read_rate(library)
    print(
        f"variant {library.variant}, {args.inputs} -> {args.outputs}, memory {rate / 1e9:.1f} GB/s"
    )
    weight = (torch.randn(args.outputs, args.inputs) * 0.05).bfloat16()
    formats = FORMATS if args.inputs % 256 else FORMATS | K_QUANTS
    for name, convert in formats.items():
        if not any(part in name for part in args.only):
            continue
        layout, copies, num_bytes = _layout(library, weight, convert, args.memory_mb)
        if args.against is not None:
            other = load(library.variant, args.against)
            for rows in args.rows:
                _print_ratio(f"{name} rows {rows}", (library, other), layout, rows, args.threads)
            continue
        program = Program(library, layout)
        for rows in args.rows:
            spent = _median_us(program, rows) / copies
            work = 2 * rows * weight.numel() / spent / 1e3
            speed = num_bytes / spent / 1e3
            now = read_rate(library)  # it changes by the minute on shared machines
            print(
                f"{name} rows {rows}: {spent:.0f} us, {speed:.1f} GB/s, {work:.0f} G/s, "
                f"{num_bytes / now * 1e6 / spent:.2f} of the floor"
            )
    if args.against is None:
        for rows in args.rows:
            x = torch.randn(rows, args.inputs).bfloat16()
            spent = _time_us(lambda x=x: torch.nn.functional.linear(x, weight))
            print(f"torch bf16 rows {rows}: {spent:.0f} us")


def _layout(library, weight, convert, memory_mb):
    """Linears over copies of the weight, all reading one input; copies; bytes of each."""
    limits = ProgramLimits(max_tokens=max(ROWS), max_outputs=1)
    tracer = NativeTracer(torch.bfloat16, limits, {}, library.constants)
    x = tracer.input(weight.shape[1], "bf16")
    each = pack(convert(weight), torch.bfloat16).num_bytes
    copies = -(-(memory_mb << 20) // each)
    for index in range(copies):
        ops.linear(x, DeferredWeight(weight.shape, lambda: convert(weight), str(index)))
    layout = compile_graph(tracer.graph)
    Program(library, layout).read(x, max(ROWS)).copy_(torch.randn(max(ROWS), weight.shape[1]))
    return layout, copies, each


def _print_ratio(
    name: str, libraries: Sequence[Library], layout: ProgramLayout, rows: int, threads: int
) -> None:
    """Times by the first library over those by the second, round by round."""
    programs = [Program(library, layout) for library in libraries]
    found: list[float] = []
    for _ in range(ROUNDS):
        spent: list[float] = []
        for library, program in zip(libraries, programs, strict=True):
            library.dll.sylvan_threads(threads)
            spent.append(_median_us(program, rows))
            library.dll.sylvan_threads(1)  # waiting threads would take time from the other library
        found.append(spent[0] / spent[1])
    print(
        f"{name}: {statistics.median(found):.3f} of the other's time "
        f"({min(found):.3f} to {max(found):.3f})"
    )


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
