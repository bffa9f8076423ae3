"""Sizes of tiles, warps and pipeline stages: one frozen table instead of tuning at run time.

Tuning would measure while serving, differ from run to run, and rule out compiling ahead of time.
`sylvan.kernels.aot` checks the table: it compiles every row and rejects spilled registers, except
where spilling was measured to be faster.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Arch = Literal["interpreter", "sm80", "sm90", "sm100", "gfx9"]
"""Families that tiles are chosen by.

`sm90` is Hopper, `sm100` Blackwell of data centres, `sm80` all other NVIDIA chips, which have less
shared memory; all of AMD's are `gfx9`.
"""
_LIKE: Mapping[Arch, Arch] = MappingProxyType({"sm100": "sm90"})
"""The architecture whose entries one takes, too."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `cols` of the output or the scores; `inner`: block of the summed dimension.

    Up to `programs` programs share the sum of a product (split-K). `split`: minimum tokens of a KV
    split in decoding; 0: derived from the number of heads.
    """

    rows: int
    cols: int
    inner: int = 0
    warps: int = 4
    stages: int = 2
    programs: int = 0
    split: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Constants and launch options of a kernel of matrix products."""
        sizes = {"ROWS": self.rows, "COLS": self.cols, "INNER": self.inner}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True, slots=True)
class TileEntry:
    """Applies to heads (or rows) up to `width`, elements up to `size` bytes, on `arch` (or any)."""

    op: str
    arch: Arch | None
    width: int
    size: int
    tile: Tile


_ANY = 1 << 30

# The first matching entry applies: narrow before wide, chips before the general case.
TABLE: tuple[TileEntry, ...] = (
    # ---- one query per request: memory-bound, so small tiles and a deep pipeline
    TileEntry("decode", "gfx9", 64, 2, Tile(16, 64, warps=4, stages=1)),
    TileEntry("decode", "gfx9", 128, 2, Tile(16, 64, warps=4, stages=1)),
    TileEntry("decode", "gfx9", _ANY, 4, Tile(16, 16, warps=4, stages=1)),
    TileEntry("decode", None, 64, 2, Tile(16, 64, warps=4, stages=2)),
    TileEntry("decode", None, 128, 2, Tile(16, 64, warps=4, stages=3)),
    TileEntry("decode", None, 256, 2, Tile(16, 32, warps=4, stages=3)),
    TileEntry("decode", None, 128, 4, Tile(16, 16, warps=4, stages=2)),
    TileEntry("decode", None, _ANY, 2, Tile(16, 32, warps=8, stages=2)),
    TileEntry("decode", None, _ANY, 4, Tile(16, 16, warps=8, stages=1)),
    # ---- many queries: bound by the matrix units; registers hold rows x value columns
    TileEntry("extend", "gfx9", 128, 2, Tile(64, 64, warps=4, stages=1)),
    TileEntry("extend", "gfx9", 256, 2, Tile(64, 32, warps=4, stages=1)),
    TileEntry("extend", "gfx9", _ANY, 4, Tile(16, 16, warps=4, stages=1)),
    TileEntry("extend", "sm100", 128, 2, Tile(128, 64, warps=8, stages=3)),
    TileEntry("extend", "sm100", 256, 2, Tile(128, 32, warps=8, stages=2)),
    TileEntry("extend", "sm90", 128, 2, Tile(128, 64, warps=4, stages=3)),
    TileEntry("extend", "sm90", 256, 2, Tile(128, 64, warps=8, stages=2)),
    TileEntry("extend", None, 64, 2, Tile(64, 64, warps=4, stages=2)),
    TileEntry("extend", None, 128, 2, Tile(64, 64, warps=4, stages=3)),
    TileEntry("extend", None, 256, 2, Tile(64, 32, warps=8, stages=2)),
    TileEntry("extend", None, 128, 4, Tile(16, 16, warps=4, stages=1)),
    TileEntry("extend", "sm80", _ANY, 2, Tile(16, 32, warps=8, stages=2)),
    TileEntry("extend", None, _ANY, 2, Tile(16, 32, warps=4, stages=2)),
    TileEntry("extend", None, _ANY, 4, Tile(16, 16, warps=8, stages=1)),
    # ---- latents, by heads and cache dtype: 64 rows are what four warps multiply at once
    TileEntry("latent decode", "gfx9", _ANY, 4, Tile(16, 16, warps=4, stages=1)),
    TileEntry("latent decode", None, 16, 1, Tile(16, 64, warps=8, stages=2)),
    TileEntry("latent decode", None, 16, 2, Tile(16, 32, warps=8, stages=2)),
    TileEntry("latent decode", None, _ANY, 1, Tile(32, 32, warps=8, stages=2)),
    TileEntry("latent decode", "sm100", _ANY, 2, Tile(16, 32, warps=8, stages=2)),
    TileEntry("latent decode", "sm90", _ANY, 2, Tile(64, 64, warps=8, stages=2, split=1024)),
    TileEntry("latent decode", None, _ANY, 2, Tile(16, 32, warps=8, stages=2)),
    TileEntry("latent decode", None, _ANY, 4, Tile(16, 16, warps=8, stages=1)),
    # pages of one token: their addresses take registers
    TileEntry("chosen decode", "gfx9", _ANY, 4, Tile(16, 16, warps=4, stages=1)),
    TileEntry("chosen decode", "sm90", _ANY, 2, Tile(32, 32, warps=8, stages=2)),
    TileEntry("chosen decode", None, _ANY, 2, Tile(16, 32, warps=8, stages=2)),
    TileEntry("chosen decode", None, _ANY, 4, Tile(16, 16, warps=8, stages=1)),
    TileEntry("latent extend", "gfx9", _ANY, 4, Tile(16, 16, warps=4, stages=1)),
    TileEntry("latent extend", None, _ANY, 1, Tile(16, 32, warps=4, stages=2)),
    TileEntry("latent extend", "sm100", _ANY, 2, Tile(16, 32, warps=4, stages=2)),
    TileEntry("latent extend", "sm90", _ANY, 2, Tile(64, 64, warps=8, stages=2)),
    TileEntry("latent extend", None, _ANY, 2, Tile(16, 32, warps=4, stages=2)),
    TileEntry("latent extend", None, _ANY, 4, Tile(16, 16, warps=8, stages=1)),
    # ---- linear layer, one row, by number of inputs
    TileEntry("row", None, 3072, 2, Tile(1, 2, 1024, warps=4)),
    TileEntry("row", None, _ANY, 2, Tile(1, 4, 2048, warps=8)),
    # ---- the same with a gate: two weight rows per output
    TileEntry("gated row", None, 3072, 2, Tile(1, 1, 1024, warps=4)),
    TileEntry("gated row", None, _ANY, 2, Tile(1, 2, 2048, warps=8)),
    # ---- experts, one row: first product by number of inputs, and second product
    TileEntry("row gate", None, 3072, 2, Tile(1, 1, 1024, warps=4)),
    TileEntry("row gate", None, _ANY, 2, Tile(1, 2, 2048, warps=8)),
    TileEntry("row down", None, 1024, 2, Tile(1, 2, 1024, warps=4)),
    TileEntry("row down", None, _ANY, 2, Tile(1, 2, 2048, warps=8)),
    # ---- quantised weights, few rows, by number of rows
    TileEntry("few", "gfx9", _ANY, 2, Tile(16, 32, 128, warps=4, stages=1, programs=1024)),
    TileEntry("few", None, _ANY, 2, Tile(16, 64, 128, warps=8, stages=4, programs=528)),
    TileEntry("few bytes", "gfx9", _ANY, 2, Tile(16, 32, 128, warps=4, stages=1, programs=1024)),
    TileEntry("few bytes", "sm100", _ANY, 2, Tile(16, 64, 128, warps=8, stages=4, programs=528)),
    TileEntry("few bytes", None, 4, 2, Tile(16, 32, 128, warps=4, stages=5, programs=528)),
    TileEntry("few bytes", None, _ANY, 2, Tile(16, 64, 128, warps=4, stages=4, programs=528)),
    # ---- quantised linear layer, by number of rows
    TileEntry("coded", "gfx9", 16, 2, Tile(16, 32, 64, warps=4, stages=1)),
    TileEntry("coded", "gfx9", _ANY, 2, Tile(64, 64, 64, warps=4, stages=1)),
    TileEntry("coded", None, 16, 2, Tile(16, 32, 64, warps=4, stages=3)),
    TileEntry("coded", "sm100", 64, 2, Tile(32, 64, 64, warps=8, stages=2)),
    TileEntry("coded", None, 64, 2, Tile(32, 64, 64, warps=8, stages=3)),
    TileEntry("coded", None, _ANY, 2, Tile(64, 64, 64, warps=8, stages=2)),
    TileEntry("coded", None, _ANY, 4, Tile(16, 32, 32, warps=4, stages=1)),
    # ---- FP8 on both sides, by number of rows; `inner` is the group of scales
    TileEntry("fp8", "sm80", _ANY, 1, Tile(64, 128, 128, warps=8, stages=4)),
    TileEntry("fp8", None, _ANY, 1, Tile(64, 128, 128, warps=4, stages=4)),
    # ---- quantised experts of few rows, by codes of four and of eight bits; shifts take registers
    TileEntry("few experts", "gfx9", _ANY, 2, Tile(16, 32, 128, warps=4, stages=1)),
    TileEntry("few experts", None, _ANY, 2, Tile(16, 64, 128, warps=4, stages=3)),
    TileEntry("few experts, bytes", "gfx9", _ANY, 2, Tile(16, 32, 128, warps=4, stages=1)),
    TileEntry("few experts, bytes", None, _ANY, 2, Tile(16, 64, 128, warps=4, stages=4)),
    TileEntry("few experts, shifts", "gfx9", _ANY, 2, Tile(16, 32, 128, warps=4, stages=1)),
    TileEntry("few experts, shifts", None, _ANY, 2, Tile(16, 32, 128, warps=4, stages=3)),
    # ---- quantised experts, by mean rows per expert
    TileEntry("coded experts", "gfx9", _ANY, 2, Tile(16, 64, 64, warps=4, stages=1)),
    TileEntry("coded experts", None, 16, 2, Tile(16, 64, 64, warps=4, stages=3)),
    TileEntry("coded experts", "sm80", _ANY, 2, Tile(64, 64, 32, warps=8, stages=3)),
    TileEntry("coded experts", None, _ANY, 2, Tile(64, 64, 64, warps=8, stages=2)),
    TileEntry("coded experts", None, _ANY, 4, Tile(16, 32, 32, warps=4, stages=1)),
    # ---- experts, by mean rows per expert
    TileEntry("experts", "gfx9", 16, 2, Tile(16, 64, 64, warps=4, stages=1)),
    TileEntry("experts", "gfx9", _ANY, 2, Tile(64, 128, 64, warps=4, stages=1)),
    TileEntry("experts", "sm90", 1, 2, Tile(16, 32, 128, warps=2, stages=4)),
    TileEntry("experts", "sm90", 12, 2, Tile(16, 64, 128, warps=4, stages=4)),
    TileEntry("experts", "sm90", 64, 2, Tile(64, 128, 64, warps=4, stages=3)),
    TileEntry("experts", "sm90", 256, 2, Tile(128, 128, 64, warps=8, stages=3)),
    TileEntry("experts", "sm90", _ANY, 2, Tile(128, 256, 64, warps=8, stages=4)),
    TileEntry("experts", None, 16, 2, Tile(16, 128, 64, warps=4, stages=4)),
    TileEntry("experts", None, 64, 2, Tile(32, 128, 64, warps=4, stages=3)),
    TileEntry("experts", None, _ANY, 2, Tile(64, 128, 64, warps=4, stages=3)),
    TileEntry("experts", None, _ANY, 4, Tile(16, 32, 32, warps=4, stages=1)),
)


@functools.cache
def tile(op: str, width: int, size: int, arch: Arch) -> Tile:
    """The tile of `op` for heads of `width` columns and elements of `size` bytes."""
    for entry in TABLE:
        fits = width <= entry.width and size <= entry.size
        if entry.op == op and entry.arch in (None, arch, _LIKE.get(arch)) and fits:
            return entry.tile
    raise AssertionError(f"no tile for {op} {width} {size} {arch}")


def row_warps(width: int) -> int:
    """Number of warps for a program with one row of `width` (a power of two) elements."""
    return max(1, min(16, width // 512))


def ceil_div(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two >= n, as Triton requires for block sizes."""
    return 1 << max(0, n - 1).bit_length()
