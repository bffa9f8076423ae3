"""Native paged attention by page size, batch and context, in microseconds a layer.

    python benchmarks/kernels/bench_attention.py --heads 14 --kv-heads 2 --head-dim 64

Pages are scattered over several layers, so that long contexts come from memory.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.native.binding import Kind, Run
from sylvan.kernels.native.library import load
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits
from sylvan.kernels.paged.cache import LayerPages, PageShape

LAYERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant")
    parser.add_argument("--int8", action="store_true", help="pages of int8 instead of bf16")
    args = parser.parse_args()
    library = load(args.variant)
    library.dll.sylvan_threads(args.threads)
    for page_size in (16, 32, 64, 128):
        for reqs, context, rows in (
            (1, 256, 1),
            (8, 256, 1),
            (32, 256, 1),
            (8, 2048, 1),
            (1, 0, 512),
        ):
            spent, num_bytes = _measure(library, args, page_size, (reqs, context, rows))
            print(
                f"page {page_size} requests {reqs} context {context} rows {rows}: "
                f"{spent:.0f} us, {num_bytes / spent / 1e3:.1f} GB/s of KV"
            )


def _measure(library, args, page_size, work):
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
    pages = {i: LayerPages(shape, reqs * per_req + 1) for i in range(LAYERS)}
    limits = RecorderLimits(max_tokens=512, max_outputs=1)
    recorder = NativeRecorder(torch.bfloat16, limits, pages, library.constants)
    qkv = recorder.input((args.heads + 2 * args.kv_heads) * args.head_dim, "bf16")
    for i in range(LAYERS):
        layer = AttentionLayer(
            index=i,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            scale=args.head_dim**-0.5,
        )
        ops.attention(qkv, layer)
    program = Program(library, place(recorder.draft))
    program.read(qkv, 512).copy_(torch.randn(512, qkv.cols))
    table = np.random.default_rng(0).permutation(reqs * per_req).astype(np.int32) + 1
    table = table.reshape(reqs, per_req)
    positions = np.tile(np.arange(context, context + rows), reqs).astype(np.int32)
    slots = table[np.repeat(np.arange(reqs), rows), positions // page_size] * page_size
    arrays = {
        "positions": positions,
        "slots": slots + positions % page_size,
        "row_start": np.arange(reqs + 1) * rows,
        "kv_len": np.full(reqs, context + rows),
        "table_row": np.arange(reqs),
        "page_table": table,
    }
    arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    step = Run(tokens=reqs * rows, seqs=reqs, table_stride=per_req, **pointers)
    runs = [program.profile(step) for _ in range(9)][1:]
    mine = {Kind.ATTENTION, Kind.ATTENTION_MERGE}
    total = statistics.median(sum(ns for kind, ns in run if kind in mine) / 1e3 for run in runs)
    of_head = args.head_dim + 4 if args.int8 else 2 * args.head_dim
    return total / LAYERS, reqs * (context + rows) * 2 * args.kv_heads * of_head


if __name__ == "__main__":
    main()
