"""Traces collectives of ranks that share memory."""

from __future__ import annotations

import torch

from sylvan.kernels.api import Communicator, TracedTensor, Unsupported
from sylvan.kernels.native.builder import ProgramBuilder, padded
from sylvan.kernels.native.opset import AllGather, AllReduce, RankMemory
from sylvan.kernels.native.ranks import SharedRanks


class RankTracer:
    """Traces the collectives of a program; all of them use the same shared memory."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self._builder = builder
        self._shared: int | None = None

    def all_reduce(
        self,
        x: TracedTensor,
        ranks: Communicator,
        bias: torch.Tensor | None,
        like: TracedTensor,
    ) -> TracedTensor:
        """See `ops.all_reduce`."""
        builder = self._builder
        memory = self.memory(ranks, padded(x.cols))
        out = builder.new(x.cols, like.dtype, x)
        op = AllReduce(
            ranks=memory,
            x=x.id,
            bias=None if bias is None else builder.vector(bias),
            out=out.id,
            cols=x.cols,
            x_f32=builder.is_wide(x),
            out_f32=builder.is_wide(out),
        )
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def all_gather(self, x: TracedTensor, ranks: Communicator, cols: int) -> TracedTensor:
        """See `ops.all_gather`."""
        builder = self._builder
        if x.dtype != "f32":
            raise Unsupported(f"gathering {x.dtype} rows of several ranks")
        share = -(-cols // ranks.size)
        memory = self.memory(ranks, share)
        out = builder.new(cols, "f32", x)
        op = AllGather(ranks=memory, x=x.id, out=out.id, cols=cols, share=share, own_cols=x.cols)
        builder.emit(op, out, dtype=builder.dtype)
        return out

    def memory(self, ranks: Communicator, row_numbers: int) -> RankMemory:
        """Memory that the ranks share, for rows of so many numbers."""
        if not isinstance(ranks, SharedRanks):
            raise Unsupported("collectives of ranks that share no memory")
        if 4 * row_numbers > ranks.buffer_bytes:
            raise Unsupported(f"collectives of rows of {row_numbers} columns")
        if self._shared is None:
            self._shared = self._builder.graph.constant(ranks.memory)
        return RankMemory(
            memory=self._shared,
            rank=ranks.rank,
            size=ranks.size,
            buffer_bytes=ranks.buffer_bytes,
            timeout_s=ranks.timeout_s,
        )
