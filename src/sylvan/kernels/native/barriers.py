"""Which ops wait for the ones before them. All threads of a program pass a barrier there.

An op waits if it touches memory that an op since the last barrier wrote, or writes what one of them
touched. Then projections of the same rows run side by side: a thread that finds no tile of one left
takes tiles of the next.
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
    Wkv7Out,
    Wkv7Scan,
    WkvScan,
    Xielu,
)
from sylvan.kernels.native.schema import Op, buffers_of

Range = tuple[int, int]
"""Addresses: the first one, and the one after the last."""

# Their kernels touch nothing but their operands. All other ops wait, and are waited for.
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
    *(RgLruScan, TokenMix, Wkv7Out, Wkv7Scan, WkvScan),
)


def waits(ops: Sequence[Op], home: Sequence[int], memory: Sequence[Bytes]) -> list[bool]:
    """Whether each op waits.

    Args:
        ops: In the order in which they run.
        home: Entry of `memory` of each virtual buffer.
        memory: Empty where the caller binds it; whoever touches that waits.
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
