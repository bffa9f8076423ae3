"""Times native paged attention by page size: storing and attending to keys and values.

    python benchmarks/kernels/bench_attention.py --pages 16 32 64 128

One table: microseconds per layer with pages of 64 tokens (the first of `--pages` if 64 is not among
them), and the ratio of other page sizes to it. Sizes are interleaved within each round, in another
order each time; numbers are medians over the rounds, and [least-most] of the ratios. Pages are in
random order, and memory larger than the caches is read before each run, as a step reads its
weights, so that keys and values come from memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import numpy as np
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.paged.cache import PageShape, allocate_pages

LAYERS = 4
SWEPT_BYTES = 128 << 20
DECODE = [(batch, context, 1) for context in (1024, 4096) for batch in (1, 8, 32)]
EXTEND = [
    (1, 0, 512),
    (1, 1024, 512),
    (4, 4096, 128),
]  # requests, tokens before, new tokens of each


class Attention:
    """Layers of attention over pages of one size, for `work`."""

    def __init__(self, library, args, page_size, work):
        reqs, context, rows = work
        per_req = -(-(context + rows) // page_size)
        shape = PageShape(
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            value_dim=args.head_dim,
            page_size=page_size,
            dtype=torch.bfloat16,
            int8=args.int8,
        )
        pages = allocate_pages(shape, reqs * per_req + 1, LAYERS)
        pages.memory[:] = 60  # small numbers; memory that was never written is read from one place
        self._pages = dict(enumerate(pages.layers))
        limits = ProgramLimits(max_tokens=reqs * rows, max_outputs=1)
        tracer = NativeTracer(torch.bfloat16, limits, self._pages, library.constants)
        qkv = tracer.input((args.heads + 2 * args.kv_heads) * args.head_dim, "bf16")
        for i in range(LAYERS):
            layer = AttentionLayer(
                index=i,
                num_heads=args.heads,
                num_kv_heads=args.kv_heads,
                head_dim=args.head_dim,
                scale=args.head_dim**-0.5,
            )
            ops.attention(qkv, layer)
        self._program = Program(library, compile_graph(tracer.graph))
        self._program.read(qkv, reqs * rows).copy_(torch.randn(reqs * rows, qkv.cols))
        self._arrays = _step_arrays(page_size, work, per_req)
        pointers = {name: array.ctypes.data for name, array in self._arrays.items()}
        self._step = StepRun(tokens=reqs * rows, seqs=reqs, table_stride=per_req, **pointers)

    def spent(self):
        """Return the microseconds per layer."""
        return sum(ns for _, ns in self._program.profile(self._step)) / 1e3 / LAYERS


def _step_arrays(page_size, work, per_req):
    reqs, context, rows = work
    table = np.random.default_rng(0).permutation(reqs * per_req).astype(np.int32) + 1
    table = table.reshape(reqs, per_req)
    positions = np.tile(np.arange(context, context + rows), reqs)
    slots = table[np.repeat(np.arange(reqs), rows), positions // page_size] * page_size
    arrays = {
        "positions": positions,
        "slots": slots + positions % page_size,
        "row_start": np.arange(reqs + 1) * rows,
        "kv_len": np.full(reqs, context + rows),
        "table_row": np.arange(reqs),
        "page_table": table,
    }
    return {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}


def _measure(library, args, work, swept):
    """Return median microseconds by page size, and the ratios to the base by round."""
    base = _base(args)
    sizes = {size: Attention(library, args, size, work) for size in args.pages}
    for attention in sizes.values():
        attention.spent()
    rounds = []
    for turn in range(args.rounds):
        spent = {}
        for i in range(len(args.pages)):
            size = args.pages[(turn + i) % len(args.pages)]
            swept.sum()
            spent[size] = sizes[size].spent()
        rounds.append(spent)
    medians = {size: statistics.median(r[size] for r in rounds) for size in sizes}
    ratios = {size: [r[size] / r[base] for r in rounds] for size in sizes}
    return medians, ratios


def _base(args):
    return 64 if 64 in args.pages else args.pages[0]


def _row(args, work, medians, ratios):
    reqs, context, rows = work
    base = _base(args)
    of_head = args.head_dim + 4 if args.int8 else 2 * args.head_dim
    num_bytes = reqs * (context + rows) * 2 * args.kv_heads * of_head
    what = f"decode, batch {reqs}" if rows == 1 else f"extend, {reqs} x {rows} tokens"
    first = f"{medians[base]:.0f} us, {num_bytes / medians[base] / 1e3:.1f} GB/s of KV"
    others = [
        f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"
        for size, values in ratios.items()
        if size != base
    ]
    return f"| {what}, context {context} | {first} | " + " | ".join(others) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant")
    parser.add_argument("--int8", action="store_true", help="pages of int8 instead of bf16")
    args = parser.parse_args()
    args.pages = sorted(set(args.pages))
    library = load(args.variant)
    library.dll.sylvan_threads(args.threads)
    swept = np.ones(SWEPT_BYTES // 8)
    others = [f"{size} / {_base(args)}" for size in args.pages if size != _base(args)]
    print(
        f"{library.variant}, {args.threads} threads, {args.heads} heads of {args.head_dim}, ",
        end="",
    )
    print(f"{args.kv_heads} for keys and values in {'int8' if args.int8 else 'bf16'}\n")
    print(f"| work | pages of {_base(args)} | " + " | ".join(others) + " |")
    print("|---" * (2 + len(others)) + "|")
    for work in (*DECODE, *EXTEND):
        print(_row(args, work, *_measure(library, args, work, swept)))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
