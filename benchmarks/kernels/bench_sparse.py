"""Compares sparse latent attention with dense: time per layer to decode a token, by context.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/kernels/bench_sparse.py --contexts 2048 8192 32768

The shape is DeepSeek V3.2's: 128 heads over latents of 512 + 64 columns, an index of 64 heads of
128 columns that selects 2048 tokens. *dense*: the step program's attention over all tokens.
*sparse*: the step program's store, scores, selection, and attention to the selected tokens.
*PyTorch*: the same by the reference, with `--reference`. Runs are interleaved within each round;
numbers are medians over the rounds in milliseconds, and ratios are medians of the rounds' ratios.
The projections before and after are the same on both sides, and left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import (
    AttentionLayer,
    HeadNorm,
    IndexedRows,
    LatentParts,
    LatentShape,
    Rope,
)
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.paged.cache import PageShape, allocate_pages
from sylvan.kernels.sparse.reference import attend_slots, choose

PAGE = 16
SHAPE = LatentShape(num_heads=128, nope=128, rope_dim=64, value=128, latent=512)
COLUMNS, INDEX_HEADS, INDEX_COLUMNS = 576, 64, 128
LAYER = AttentionLayer(
    index=0,
    num_heads=SHAPE.num_heads,
    num_kv_heads=1,
    head_dim=COLUMNS,
    v_head_dim=SHAPE.latent,
    scale=(SHAPE.nope + SHAPE.rope_dim) ** -0.5,
)


class Traced:
    """One row over a context, computed by ops of a step program."""

    OPS = ("Attention", "AttentionMerge", "RopeStore")

    def __init__(self, library, context, top_k):
        count = -(-context // PAGE)
        pages = allocate_pages(self.page(), count + 1, 1)
        self.fill(pages.memory)
        limits = ProgramLimits(max_tokens=1, max_outputs=1)
        layers = dict(enumerate(pages.layers))
        tracer = NativeTracer(torch.bfloat16, limits, layers, library.constants)
        q = tracer.input(SHAPE.num_heads * (SHAPE.nope + SHAPE.rope_dim), "bf16")
        kv = tracer.input(COLUMNS, "bf16")
        up = torch.randn(SHAPE.num_heads * (SHAPE.nope + SHAPE.value), SHAPE.latent) * 0.02
        norm = HeadNorm(torch.ones(SHAPE.latent, dtype=torch.bfloat16), 1e-6)
        rope = Rope(torch.ones(context + 1, SHAPE.rope_dim), interleaved=True)
        parts = LatentParts(SHAPE, up.bfloat16(), norm, rope)
        inputs = [q, kv, *self.attend(tracer, q, kv, parts, top_k)]
        self._pages = pages
        self._program = Program(library, compile_graph(tracer.graph))
        for value in inputs:
            self._program.read(value, 1).copy_(torch.randn(1, value.cols))
        self._arrays = _arrays(context, count)
        pointers = {name: array.ctypes.data for name, array in self._arrays.items()}
        self._step = StepRun(tokens=1, seqs=1, table_stride=count, **pointers)

    def page(self):
        return PageShape(
            num_kv_heads=1,
            head_dim=COLUMNS,
            value_dim=SHAPE.latent,
            shared=True,
            page_size=PAGE,
            dtype=torch.bfloat16,
        )

    def fill(self, memory):
        memory[:] = 60

    def attend(self, tracer, q, kv, parts, top_k):
        ops.latent_attention(q, kv, parts, LAYER)
        return ()

    def spent(self):
        """Return the seconds of the ops that store and attend."""
        spent = self._program.profile(self._step)
        return sum(ns for op, ns in spent if type(op).__name__ in self.OPS) / 1e9


class Sparse(Traced):
    """The same over the tokens that an index selects."""

    OPS = ("TokenStore", "IndexScores", "IndexChoice", "SparseAttention")

    def page(self):
        return PageShape(
            num_kv_heads=1,
            head_dim=COLUMNS,
            value_dim=INDEX_COLUMNS,
            page_size=PAGE,
            dtype=torch.bfloat16,
            tokens=True,
        )

    def fill(self, memory):
        count = memory.size // 2
        numbers = torch.randn(count).bfloat16()  # so that the choice is of tokens all over
        memory.reshape(-1)[:] = numbers.view(torch.uint8).numpy()

    def attend(self, tracer, q, kv, parts, top_k):
        heads = tracer.input(INDEX_HEADS * INDEX_COLUMNS, "bf16")
        key, weights = tracer.input(INDEX_COLUMNS, "bf16"), tracer.input(INDEX_HEADS, "f32")
        index = IndexedRows(q=heads, k=key, weights=weights, top_k=top_k)
        ops.sparse_latent_attention(q, kv, parts, LAYER, index)
        return heads, key, weights


class Reference:
    """The same in PyTorch."""

    def __init__(self, context, top_k):
        count = -(-context // PAGE)
        self._rows = torch.randn(count, PAGE, 1, COLUMNS + INDEX_COLUMNS, dtype=torch.bfloat16)
        self._q = torch.randn(1, SHAPE.num_heads, COLUMNS, dtype=torch.bfloat16)
        self._index = torch.randn(1, INDEX_HEADS, INDEX_COLUMNS), torch.randn(1, INDEX_HEADS)
        self._pages, self._context, self._top_k = torch.randperm(count), context, top_k

    def spent(self):
        began = time.perf_counter()
        pages, first = self._pages, self._context - 1
        keys = self._rows[pages, :, 0, COLUMNS:].flatten(0, 1)[: self._context]
        chosen = choose(*self._index, keys, first, min(self._top_k, self._context))
        slots = pages[chosen // PAGE] * PAGE + chosen % PAGE
        attend_slots(self._q, self._rows, slots, LAYER, SHAPE.latent)
        return time.perf_counter() - began


def _arrays(context, count):
    """Return the arrays of one request whose last token is the row."""
    arrays = {
        "positions": [context - 1],
        "slots": [PAGE + context - 1],
        "row_start": [0, 1],
        "kv_len": [context],
        "table_row": [0],
        "page_table": range(1, count + 1),
    }
    return {name: np.array(array, np.int32) for name, array in arrays.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reference", action="store_true", help="PyTorch, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load()
    library.dll.sylvan_threads(args.threads)
    names = ["dense", "sparse", *(["PyTorch"] if args.reference else [])]
    heads = [*(f"{name} ms" for name in names), *(f"dense / {name}" for name in names[1:])]
    print(f"| context | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}")
    for context in args.contexts:
        sides = [kind(library, context, args.top_k) for kind in (Traced, Sparse)]
        sides += [Reference(context, args.top_k)] if args.reference else []
        for side in sides:
            side.spent()
        rounds = [[side.spent() * 1e3 for side in sides] for _ in range(args.rounds)]
        times = [statistics.median(column) for column in zip(*rounds, strict=True)]
        ratios = [
            statistics.median(found[0] / found[i] for found in rounds) for i in range(1, len(sides))
        ]
        print(f"| {context} | {' | '.join(f'{x:.2f}' for x in (*times, *ratios))} |")
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
