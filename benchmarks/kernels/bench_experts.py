"""Times a layer of experts in milliseconds, by rows: the native ops against PyTorch op by op.

    python benchmarks/kernels/bench_experts.py --experts 64 --chosen 8 --dim 2048 --inner 1024

The shape is OLMoE's. GB/s counts the weights of the experts that the rows visit, each once. PyTorch
computes in bf16 only, so its column is bf16 for other formats as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import ExpertWeights, Routing
from sylvan.kernels.experts import reference
from sylvan.kernels.matmul.weights import quantise_int4, quantise_int8
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer

FORMATS = {
    "bf16": (2.0, lambda w: w.clone()),
    "w8a8": (1.0, quantise_int8),
    "w4a8": (0.5 + 4 / 64, lambda w: quantise_int4(w, 64)),
}
ROWS = (1, 8, 32, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("experts", 64), ("chosen", 8), ("dim", 2048), ("inner", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--variant")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dense = ExpertWeights(
        gate_up=_random(args.experts, 2 * args.inner, args.dim),
        down=_random(args.experts, args.dim, args.inner),
    )
    x, logits = _random(max(ROWS), args.dim), torch.randn(max(ROWS), args.experts)
    native = _native(args, dense, x, logits)
    routing = Routing(top_k=args.chosen)
    per_expert = 3 * args.inner * args.dim * FORMATS[args.format][0]
    for rows in ROWS:
        mine = _median_ms(args.repeats, lambda n=rows: native(n))
        parts = x[:rows], logits[:rows], routing, dense
        theirs = _median_ms(3, lambda p=parts: reference.experts(*p))
        visited = int((reference.experts(*parts)[1] > 0).sum())
        rate = visited * per_expert / mine / 1e6
        print(
            f"rows {rows}: {mine:.3f} ms native, {theirs:.3f} ms PyTorch, {visited} experts, "
            f"{rate:.1f} GB/s"
        )


def _random(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 0.02).bfloat16()


def _native(
    args: argparse.Namespace, dense: ExpertWeights, x: torch.Tensor, logits: torch.Tensor
) -> Callable[[int], None]:
    """Return a function that computes a number of rows."""
    library, convert = load(args.variant), FORMATS[args.format][1]
    library.dll.sylvan_threads(args.threads)
    assert isinstance(dense.gate_up, torch.Tensor)
    assert isinstance(dense.down, torch.Tensor)
    weights = ExpertWeights(gate_up=convert(dense.gate_up), down=convert(dense.down))
    limits = ProgramLimits(max_tokens=max(ROWS), max_outputs=1)
    tracer = NativeTracer(torch.bfloat16, limits, {}, library.constants)
    inputs = tracer.input(args.dim, "bf16"), tracer.input(args.experts, "f32")
    tracer.pin(ops.experts(*inputs, Routing(top_k=args.chosen), weights))
    program = Program(library, compile_graph(tracer.graph))
    for value, matrix in zip(inputs, (x, logits), strict=True):
        program.read(value, max(ROWS)).copy_(matrix)

    def run(rows: int) -> None:
        program.run(StepRun(tokens=rows))

    return run


def _median_ms(repeats: int, action: Callable[[], object]) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
