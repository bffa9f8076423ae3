"""Places barriers between ops, where all threads of a program wait.

An op needs a barrier if it touches memory that an op since the last barrier wrote, or writes memory
that one of them touched. So projections of the same rows run concurrently: a thread without tiles
of one takes tiles of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.opset import (
    Activation,
    Add,
    Cast,
    Clamp,
    DeltaScan,
    Embed,
    GateRows,
    Glu,
    GroupSums,
    JoinColumns,
    LayerNorm,
    Linear,
    MlstmScan,
    Quantise,
    RgLruScan,
    RmsNorm,
    Scale,
    ScaleRows,
    ShortConv,
    Softcap,
    SpaceScan,
    TakeColumns,
    TokenMix,
    Wkv6Scan,
    Wkv7Out,
    Wkv7Scan,
    WkvScan,
    Xielu,
)
from sylvan.kernels.native.schema import Op, buffers_of

Range = tuple[int, int]
"""Addresses: the first one, and the one after the last."""

# Kernels of these ops touch only their operands. All other ops get a barrier before and after.
_BY_OPERANDS = (
    *(Activation, Add, Cast, Clamp, DeltaScan, Embed, GateRows, Glu, GroupSums, LayerNorm, Linear),
    *(
        MlstmScan,
        Quantise,
        RmsNorm,
        Scale,
        ScaleRows,
        ShortConv,
        Softcap,
        SpaceScan,
        TakeColumns,
        Xielu,
    ),
    *(JoinColumns, RgLruScan, TokenMix, Wkv6Scan, Wkv7Out, Wkv7Scan, WkvScan),
)


def waits(ops: Sequence[Op], home: Sequence[int], memory: Sequence[Bytes]) -> list[bool]:
    """Return whether each op needs a barrier before it.

    Args:
        ops: In the order in which they run.
        home: Entry of `memory` of each virtual buffer.
        memory: Empty where the caller binds it; ops that touch such memory always wait.
    """
    found: list[bool] = []
    read: list[Range] = []
    written: list[Range] = []
    alone = False  # whether nothing before may share a barrier
    for op in ops:
        ranges = [*_ranges(op, home, memory)]
        its_reads = [r for r, writes in ranges if not writes]
        its_writes = [r for r, writes in ranges if writes]
        known = isinstance(op, _BY_OPERANDS) and all(end > start for (start, end), _ in ranges)
        shared = _overlap(its_reads, written) or _overlap(its_writes, [*read, *written])
        wait = alone or not known or shared
        if wait:
            read, written = [], []
        read += its_reads
        written += its_writes
        alone = not known
        found.append(wait)
    return found


def _ranges(op: Op, home: Sequence[int], memory: Sequence[Bytes]) -> Iterator[tuple[Range, bool]]:
    """Memory that an op touches, and whether it writes there."""
    for part in buffers_of(op):
        held = memory[~part.ref if part.ref < 0 else home[part.ref]]
        start = held.ctypes.data
        yield (start, start + held.nbytes), part.access != "read"


def _overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
