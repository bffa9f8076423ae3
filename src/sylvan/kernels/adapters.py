"""LoRA adapters of one linear layer, and which rows of a step use them.

Shapes: T rows of a step, K inputs, N outputs of a part, L the rank of an adapter, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from sylvan.kernels.memory import Bytes, allocate
from sylvan.protocol.arrays import IntArray

LANES = 16
MAX_PARTS = 8
_WORD = 4  # bytes
_LINE_BYTES = 64
_TILE_BYTES = 1024  # a matrix tile may read this far beyond the last block
BLOCK_ROWS = 16
"""Rows of one adapter that a program on a device computes together."""
ENTRY = np.dtype([("down", "u8"), ("up", "u8"), ("rank", "i4"), ("scale", "f4")])
"""Factors of one part of a layer in a slot, as kernels read them; rank 0: unchanged."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The change of a matrix (N, K): scale * up down. `down` is (L, K), `up` (N, L)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """L."""
        return self.down.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of both matrices."""
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """`Factors` in kernel order: blocks of 16 outputs, one 32-bit word of inputs at a time."""

    down: Bytes
    up: Bytes
    rank: int
    scale: float

    @property
    def num_bytes(self) -> int:
        """Bytes of both matrices."""
        return self.down.nbytes + self.up.nbytes


Prepared = Factors | PackedFactors


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of a step in the form that device kernels read.

    Attributes:
        listed: Rows with an adapter, sorted by slot. Shape: int32 (R,).
        blocks: Slot, first index in `listed` and count of each block of at most `BLOCK_ROWS` rows.
            Shape: int32 (B, 3).
    """

    listed: torch.Tensor
    blocks: torch.Tensor


def side_by_side(layers: Sequence[Sequence[Prepared | None]]) -> list[tuple[Prepared | None, ...]]:
    """Copy all packed matrices of an adapter into one region, in the order of reading.

    A step reads each adapter once. With thousands of small regions on ordinary pages, page walks
    would take as long as reading the bytes; one region on huge pages avoids them.
    """
    order: list[Bytes] = []
    for parts in layers:
        packed = [part for part in parts if isinstance(part, PackedFactors)]
        order += [part.down for part in packed] + [part.up for part in packed]
    memory = allocate(sum(matrix.nbytes for matrix in order) + _TILE_BYTES)
    placed: dict[int, Bytes] = {}
    start = 0
    for matrix in order:
        stop = start + matrix.nbytes
        memory[start:stop] = matrix
        placed[id(matrix)] = memory[start:stop]
        start = stop

    def moved(part: Prepared | None) -> Prepared | None:
        if not isinstance(part, PackedFactors):
            return part
        return replace(part, down=placed[id(part.down)], up=placed[id(part.up)])

    return [tuple(moved(part) for part in parts) for parts in layers]


class LoraRows:
    """The adapter slot of each row of the current step.

    Args:
        num_slots: Adapters that a step may have.
        max_tokens: Rows of the largest step.
        max_rank: Largest rank of an adapter's matrices.

    Attributes:
        table: The groups as C++ kernels read them: number of groups; per group its slot, the start
            of its rows in the row list, and their count; from entry 1 + 3 S on the row list, then
            the slot of each row (-1: none).
        groups: The groups as PyTorch reads them: slots, and int64 rows.
        taken: The slots with rows that the head reads, and the indices of these rows.
        slot_of_row: Slot of each row, -1: none. Shape: int32 (max_tokens,).
    """

    def __init__(self, num_slots: int, max_tokens: int, max_rank: int) -> None:
        self.num_slots, self.max_tokens, self.max_rank = num_slots, max_tokens, max_rank
        self.memory = allocate(_WORD * (1 + 3 * num_slots + 2 * max_tokens))
        self.table: IntArray = self.memory.view(np.int32)[: 1 + 3 * num_slots + 2 * max_tokens]
        self.slot_of_row: IntArray = self.table[-max_tokens:]
        self.slot_of_row[:] = -1
        self.groups: tuple[tuple[int, torch.Tensor], ...] = ()
        self.taken: tuple[tuple[int, torch.Tensor], ...] = ()
        self._on_device: DeviceRows | None = None

    def assign(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Assign slots to rows: each span is (slot, start, stop); other rows use no adapter."""
        by_slot: dict[int, list[IntArray]] = {}
        for slot, start, stop in spans:
            by_slot.setdefault(slot, []).append(np.arange(start, stop, dtype=np.int32))
        rows = {slot: np.concatenate(parts) for slot, parts in by_slot.items()}
        self.slot_of_row[:] = -1
        at, table = 0, self.table
        listed = table[1 + 3 * self.num_slots :]
        for number, (slot, own) in enumerate(rows.items()):
            table[1 + 3 * number : 4 + 3 * number] = slot, at, len(own)
            listed[at : at + len(own)] = own
            self.slot_of_row[own] = slot
            at += len(own)
        table[0] = len(rows)
        self.groups = tuple((slot, torch.from_numpy(own).long()) for slot, own in rows.items())
        self.taken, self._on_device = (), None

    def select(self, whole: LoraRows, rows: IntArray) -> None:
        """Assign to the given rows, numbered from 0, the slots that they have in `whole`."""
        slots = whole.slot_of_row[rows]
        edges = np.flatnonzero(np.diff(slots, prepend=-2, append=-2)).tolist()
        runs = [(int(slots[start]), start, stop) for start, stop in pairwise(edges)]
        self.assign([run for run in runs if run[0] >= 0])

    def on_device(self, device: torch.device) -> DeviceRows:
        """The row groups for device kernels; copied to the device once per step."""
        if self._on_device is None:
            count, most = int(self.table[0]), 1 + 3 * self.num_slots
            spans = self.table[1 : 1 + 3 * count].reshape(count, 3)
            blocks = [
                (slot, at, min(BLOCK_ROWS, first + rows - at))
                for slot, first, rows in spans.tolist()
                for at in range(first, first + rows, BLOCK_ROWS)
            ]
            listed = torch.from_numpy(self.table[most : most + int(spans[:, 2].sum())].copy())
            table = torch.tensor(blocks, dtype=torch.int32).view(-1, 3)
            self._on_device = DeviceRows(listed.to(device), table.to(device))
        return self._on_device

    def take(self, rows: IntArray | torch.Tensor | None) -> None:
        """Set the rows of the step that the head computes next; None: rows outside a step."""
        self.taken = ()
        if rows is None or not self.groups:
            return
        numbers = rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows
        slots = self.slot_of_row[numbers]
        self.taken = tuple(
            (slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot, _ in self.groups
        )


LayerKind = Literal["linear", "head", "embedding"]


@dataclass(frozen=True, slots=True)
class LoraShape:
    """A linear layer whose outputs are parts side by side, as the checkpoint divides them.

    An embedding is a linear layer whose inputs are ids: rows of A are looked up by id. The rows of
    a head are the step's outputs. Experts are E layers of one shape; parts are ordered by expert.

    Attributes:
        inputs: K.
        outputs: N of each part.
        kind: Kind of the layer.
        num_experts: E; 1 for other layers.
    """

    inputs: int
    outputs: tuple[int, ...]
    kind: LayerKind = "linear"
    num_experts: int = 1

    @property
    def num_parts(self) -> int:
        """Number of parts, over all experts."""
        return len(self.outputs) * self.num_experts


class LoraLayer:
    """The adapters in all slots for one linear layer.

    Args:
        rows: Rows of the step; shared by all layers.
        shape: Shape of the layer.
        dtype: Dtype of the rows and of the matrices.
        device: Device of the matrices.

    Attributes:
        dtype: See above.
        of_outputs: Whether its rows are the step's sampled rows (it is the LM head).
        packed: Whether the matrices are in kernel order; set by the tracer of a step program.
        memory: The table that kernels read. Shape: (E, S, P).
        changes: Number of times a slot was filled or emptied.
    """

    def __init__(
        self, rows: LoraRows, shape: LoraShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.shape = rows, shape
        self.inputs, self.outputs = shape.inputs, shape.outputs
        self.of_outputs, self._is_table = shape.kind == "head", shape.kind == "embedding"
        self.packed, self.changes = False, 0
        self.dtype, self._device = dtype, device
        none: tuple[Prepared | None, ...] = (None,) * shape.num_parts
        self._slots: list[tuple[Prepared | None, ...]] = [none] * rows.num_slots
        self.memory = allocate(rows.num_slots * shape.num_parts * ENTRY.itemsize)
        table = shape.num_experts, rows.num_slots, len(self.outputs)
        self._table = self.memory.view(ENTRY).reshape(table)
        self._device_table: torch.Tensor | None = None
        self._device_tiles: torch.Tensor | None = None

    def prepare(self, factors: Factors) -> Prepared:
        """Convert the matrices of one part to the kernels' form."""
        if not self.packed:
            down, up = (
                m.to(self.dtype, copy=True).contiguous() for m in (factors.down, factors.up)
            )
            return Factors(down, up, factors.scale)
        down, up = (m.to(self.dtype) for m in (factors.down, factors.up))
        per_word = _WORD // self.dtype.itemsize
        words = -(-factors.rank // per_word) * per_word
        whole = -(-self.inputs // 32) * 32  # as rows are padded
        first = _bytes(down.T) if self._is_table else _packed(down, whole)
        return PackedFactors(first, _packed(up, words), factors.rank, factors.scale)

    @property
    def is_changed(self) -> bool:
        """Whether an adapter in any slot changes this layer."""
        return any(part is not None for parts in self._slots for part in parts)

    def load(self, slot: int, parts: Sequence[Prepared | None]) -> None:
        """Put an adapter into a slot; None for parts that it does not change."""
        placed: list[Prepared | None] = []
        entries: list[tuple[int, int, int, float]] = []
        for part in parts:
            there = self._on_device(part) if isinstance(part, Factors) else part
            placed.append(there)
            if there is None:
                entries.append((0, 0, 0, 0.0))
            else:
                entries.append((*_addresses(there), there.rank, there.scale))
        self._table[:, slot] = np.array(entries, ENTRY).reshape(self.shape.num_experts, -1)
        self._slots[slot], self._device_table = tuple(placed), None
        self.changes += 1

    def _on_device(self, part: Factors) -> Factors:
        down, up = (m.to(self._device, non_blocking=True) for m in (part.down, part.up))
        return Factors(down, up, part.scale)

    def device_table(self, device: torch.device) -> torch.Tensor:
        """The slot contents for device kernels; the matrices are on the device.

        Shape: int64 (S P, 3): addresses of both matrices; the rank, and above it the scale's bits.
        """
        if self._device_table is None:
            words = torch.from_numpy(self._table.reshape(-1).view(np.int64).copy())
            self._device_table = words.view(-1, 3).to(device)
        return self._device_table

    def device_tiles(self, device: torch.device, width: int) -> torch.Tensor:
        """The outputs in tiles of at most `width` columns, each of one part.

        Shape: int32 (tiles, 4): the part, the tile's first column there, its columns, and the
        part's first column.
        """
        if self._device_tiles is None:
            starts = np.cumsum([0, *self.outputs]).tolist()
            tiles = [
                (part, at, min(width, size - at), starts[part])
                for part, size in enumerate(self.outputs)
                for at in range(0, size, width)
            ]
            self._device_tiles = torch.tensor(tiles, dtype=torch.int32).to(device)
        return self._device_tiles

    def unload(self, slot: int) -> None:
        """Empty a slot."""
        self.load(slot, (None,) * self.shape.num_parts)

    def factors(self, slot: int, expert: int = 0) -> Sequence[Factors | None]:
        """The factors in a slot, one entry per part; for PyTorch."""
        found: list[Factors | None] = []
        first = expert * len(self.outputs)
        for part in self._slots[slot][first : first + len(self.outputs)]:
            assert not isinstance(part, PackedFactors), "a step program computes this layer"
            found.append(part)
        return found


def _addresses(part: Prepared) -> tuple[int, int]:
    if isinstance(part, PackedFactors):
        return part.down.ctypes.data, part.up.ctypes.data
    return part.down.data_ptr(), part.up.data_ptr()


def _packed(matrix: torch.Tensor, cols: int) -> Bytes:
    """Blocks of 16 rows (the last one padded with zeros), each word by word."""
    rows = -(-matrix.shape[0] // LANES) * LANES
    whole = F.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])).contiguous()
    return _bytes(whole.view(torch.int32).unflatten(0, (-1, LANES)).transpose(1, 2))


def _bytes(numbers: torch.Tensor) -> Bytes:
    """A contiguous copy in whole cache lines, with room for a tile after it."""
    whole = -(-numbers.nbytes // _LINE_BYTES) * _LINE_BYTES
    memory = allocate(whole + _TILE_BYTES)[:whole]
    memory[: numbers.nbytes] = numbers.contiguous().view(-1).view(torch.uint8).numpy()
    return memory
