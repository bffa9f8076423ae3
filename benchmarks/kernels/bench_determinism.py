"""Measures the cost of batch invariance: our kernels against the fastest ones without it.

    python benchmarks/kernels/bench_determinism.py --inputs 896 --outputs 9728

Linear layers are compared with oneDNN's, with weights packed beforehand (bfloat16), or with
PyTorch's (float32), which choose how to split the work by the number of rows. Attention of one new
token per request is compared with `scaled_dot_product_attention` over contiguous keys and values,
without pages. Both sides do the same work, interleaved, `--repeats` times, from memory: layers are
copied until they exceed `--memory-mb`. One JSON line per case: medians and quartiles in
microseconds per layer, and `cost`, the additional time of ours as a share (0.1: 10 % slower). Run
it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.paged.cache import PageShape, allocate_pages

PAGE = 64


@dataclass(frozen=True)
class Case:
    """Two implementations of the same work; each call computes `layers` layers."""

    name: str
    layers: int
    ours: Callable[[], object]
    other: Callable[[], object]
    against: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=896)
    parser.add_argument("--outputs", type=int, default=9728)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory-mb", type=int, default=200)
    parser.add_argument("--variant")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load(args.variant)
    library.dll.sylvan_threads(args.threads)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            for rows in args.rows:
                _report(linear(library, args, dtype, rows), library, args)
        for reqs in (rows for rows in args.rows if rows <= 32):
            _report(attention(library, args, reqs), library, args)


def linear(library: Library, args: argparse.Namespace, dtype: torch.dtype, rows: int) -> Case:
    """Compare copies of a layer that read the same input."""
    kind = "bf16" if dtype is torch.bfloat16 else "f32"
    layers = max(1, (args.memory_mb << 20) // (args.inputs * args.outputs * dtype.itemsize))
    x = torch.randn(rows, args.inputs).to(dtype)
    weights = [(torch.randn(args.outputs, args.inputs) * 0.05).to(dtype) for _ in range(layers)]
    other, against = _torch_linear(x, [weight.clone() for weight in weights])
    limits = ProgramLimits(max_tokens=rows, max_outputs=1)
    tracer = NativeTracer(dtype, limits, {}, library.constants)
    value = tracer.input(args.inputs, kind)
    for weight in weights:
        ops.linear(value, weight)  # packs it, and lets the tensor go
    program = Program(library, compile_graph(tracer.graph))
    program.read(value, rows).copy_(x)
    step = StepRun(tokens=rows)
    return Case(f"linear {kind} rows {rows}", layers, lambda: program.run(step), other, against)


def _torch_linear(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[Callable[[], object], str]:
    """The same products by PyTorch: bfloat16 by oneDNN, which packs for that number of rows."""
    if x.dtype is torch.float32:
        return lambda: [F.linear(x, weight) for weight in weights], "F.linear"
    mkldnn = torch.ops.mkldnn
    packed = [mkldnn._reorder_linear_weight(weight, len(x)) for weight in weights]
    multiply = mkldnn._linear_pointwise
    return lambda: [multiply(x, w, None, "none", [], "") for w in packed], "oneDNN, packed"


def attention(library: Library, args: argparse.Namespace, reqs: int) -> Case:
    """Compare one token per request after `--context` others, in layers with own pages."""
    heads, kv_heads, width = args.heads, args.kv_heads, args.head_dim
    per_req = -(-(args.context + 1) // PAGE)
    of_layer = 2 * reqs * per_req * PAGE * kv_heads * width * 2
    layers = max(1, min(64, (args.memory_mb << 20) // of_layer))
    shape = PageShape(
        num_kv_heads=kv_heads,
        head_dim=width,
        value_dim=width,
        page_size=PAGE,
        dtype=torch.bfloat16,
        int8=False,
    )
    pages = dict(enumerate(allocate_pages(shape, reqs * per_req + 1, layers).layers))
    limits = ProgramLimits(max_tokens=reqs, max_outputs=1)
    tracer = NativeTracer(torch.bfloat16, limits, pages, library.constants)
    value = tracer.input((heads + 2 * kv_heads) * width, "bf16")
    for i in range(layers):
        layer = AttentionLayer(
            index=i, num_heads=heads, num_kv_heads=kv_heads, head_dim=width, scale=width**-0.5
        )
        ops.attention(value, layer)
    program = Program(library, compile_graph(tracer.graph))
    program.read(value, reqs).copy_(torch.randn(reqs, value.cols))
    arrays = _tables(reqs, per_req, args.context)
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    step = StepRun(tokens=reqs, seqs=reqs, table_stride=per_req, **pointers)
    q = torch.randn(reqs, heads, 1, width).bfloat16()
    kv = [torch.randn(2, reqs, kv_heads, args.context + 1, width).bfloat16() for _ in range(layers)]

    def ours(arrays: object = arrays) -> None:  # which own the memory that `step` points at
        program.run(step)

    def other() -> None:
        for keys, values in kv:
            F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    name = f"attention bf16 requests {reqs} context {args.context}"
    return Case(name, layers, ours, other, "scaled_dot_product_attention")


def _tables(reqs: int, per_req: int, context: int) -> dict[str, np.ndarray]:
    """Return the page tables and slots of a step: scattered pages, one new token per request."""
    table = np.random.default_rng(0).permutation(reqs * per_req).reshape(reqs, per_req) + 1
    arrays = {
        "positions": np.full(reqs, context),
        "slots": table[:, context // PAGE] * PAGE + context % PAGE,
        "row_start": np.arange(reqs + 1),
        "kv_len": np.full(reqs, context + 1),
        "table_row": np.arange(reqs),
        "page_table": table,
    }
    return {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}


def _report(case: Case, library: Library, args: argparse.Namespace) -> None:
    """Time both, interleaved, and print a line."""
    times: dict[str, list[float]] = {"ours": [], "other": []}
    for repeat in range(args.repeats + 1):
        for name, action in (("ours", case.ours), ("other", case.other)):
            start = time.perf_counter()
            action()
            if repeat:  # the first is for warming up
                times[name].append((time.perf_counter() - start) * 1e6 / case.layers)
    found = {name: statistics.median(spent) for name, spent in times.items()}
    line = {
        "case": case.name,
        "variant": library.variant,
        "threads": args.threads,
        "against": case.against,
        **{f"{name}_us": round(median, 2) for name, median in found.items()},
        **{f"{name}_quartiles_us": _quartiles(spent) for name, spent in times.items()},
        "cost": round(found["ours"] / found["other"] - 1, 3),
    }
    print(json.dumps(line), flush=True)


def _quartiles(spent: list[float]) -> list[float]:
    if len(spent) < 2:
        return [round(spent[0], 2)] * 2
    first, _, third = statistics.quantiles(spent, n=4, method="inclusive")
    return [round(first, 2), round(third, 2)]


if __name__ == "__main__":
    main()
