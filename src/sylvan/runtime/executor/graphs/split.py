"""Computes a prompt op by op, so that steps of other requests can run in between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from sylvan.kernels.memory import allocate
from sylvan.kernels.native.layout import ProgramLayout
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.opset.attention import AttentionMerge
from sylvan.kernels.native.program import Program
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import BatchLimits, HostArrays
from sylvan.runtime.executor.graphs.arguments import run_arguments


class SplitPrompt:
    """Runs the layers of a model over rows of one prompt, part by part; samples nothing.

    It has its own inputs and buffers, and shares weights and pages with the steps in between.

    Args:
        library: Native kernels.
        layout: Layout of the whole program.
        stop: The segment after the layers.
        limits: Size of the largest chunk of a prompt.
        page_size: Tokens of a page.
    """

    def __init__(
        self,
        library: Library,
        layout: ProgramLayout,
        stop: int,
        limits: BatchLimits,
        page_size: int,
    ) -> None:
        self._parts = [Program(library, layout, ops=part) for part in _cuts(layout, stop)]
        entries = sorted({entry for entry in layout.home if entry >= 0})
        self._memory = [allocate(layout.memory[entry].nbytes) for entry in entries]
        for part in self._parts:
            for entry, memory in zip(entries, self._memory, strict=True):
                part.bind(entry, memory.ctypes.data)
        one = BatchLimits(
            max_tokens=limits.max_tokens, max_reqs=1, max_pages_per_req=limits.max_pages_per_req
        )
        self._host, self._page_size = HostArrays(one), page_size
        self.max_tokens, self.num_parts = limits.max_tokens, len(self._parts)
        self._run = run_arguments(self._host)
        self._run.seqs = 1

    def begin(self, ids: IntArray, start: int, pages: IntArray) -> None:
        """Set the tokens, starting at position `start`, and all pages of their request."""
        host, count = self._host, len(ids)
        host.input_ids[:count] = ids
        host.positions[:count] = np.arange(start, start + count, dtype=np.int32)
        host.page_table[0, : len(pages)] = pages
        host.q_starts[1] = self._run.tokens = count
        host.kv_lens[0] = start + count
        host.map_slots(np.zeros(count, np.int32), host.positions[:count], self._page_size)

    def run(self, part: int) -> None:
        """Compute one part, in order; releases the GIL."""
        self._parts[part].run(self._run)


def _cuts(layout: ProgramLayout, stop: int) -> Sequence[Sequence[int]]:
    """Split the ops into parts to run one by one; a merge op stays with the op it completes."""
    chosen = [i for i, op in enumerate(layout.ops) if op.segment < stop]
    merges = [isinstance(layout.ops[i], AttentionMerge) for i in chosen]
    numbers = itertools.accumulate(0 if merge else 1 for merge in merges)
    pairs = zip(numbers, chosen, strict=True)
    return [[i for _, i in part] for _, part in itertools.groupby(pairs, lambda pair: pair[0])]
