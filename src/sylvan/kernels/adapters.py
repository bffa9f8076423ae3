"""Adapters of one linear layer, and which rows of a step they are for.

Shapes: T rows of a step, K inputs, N outputs of a part, L the rank of an adapter, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from sylvan.kernels.memory import Bytes, allocate
from sylvan.protocol.arrays import IntArray

LANES = 16
MAX_PARTS = 8
_WORD = 4  # bytes
_TILE_BYTES = 1024  # a matrix tile may read so far behind the last block
ENTRY = np.dtype([("down", "u8"), ("up", "u8"), ("rank", "i4"), ("scale", "f4")])
"""Of a part of a layer in a slot, as kernels read it; rank 0 where it is unchanged."""


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
        """Of both matrices."""
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """The same in kernel order: blocks of 16 outputs, a 32-bit word of inputs at a time."""

    down: Bytes
    up: Bytes
    rank: int
    scale: float

    @property
    def num_bytes(self) -> int:
        """Of both matrices."""
        return self.down.nbytes + self.up.nbytes


Prepared = Factors | PackedFactors


def side_by_side(layers: Sequence[Sequence[Prepared | None]]) -> list[tuple[Prepared | None, ...]]:
    """The parts of each layer, with all packed matrices in one region in the order of reading.

    A step reads all of an adapter once: ordinary pages of thousands of small regions cost as much
    time as the bytes, huge pages of one region do not.
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
    """Which rows of the present step are computed with the adapter in which slot.

    Args:
        num_slots: Adapters that a step may have.
        max_tokens: Rows of the largest step.
        max_rank: Largest rank of an adapter's matrices.

    Attributes:
        table: As kernels read it: how many groups; of each the slot, where its rows begin in the
            list of rows, and how many they are; from entry 1 + 3 S on, the list of rows.
        groups: The same for PyTorch: slots, and int64 rows.
    """

    def __init__(self, num_slots: int, max_tokens: int, max_rank: int) -> None:
        self.num_slots, self.max_tokens, self.max_rank = num_slots, max_tokens, max_rank
        self.memory = allocate(_WORD * (1 + 3 * num_slots + max_tokens))
        self.table: IntArray = self.memory.view(np.int32)
        self.groups: tuple[tuple[int, torch.Tensor], ...] = ()

    def assign(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Rows `start` to `stop` of each (slot, start, stop) use that slot; all others none."""
        by_slot: dict[int, list[IntArray]] = {}
        for slot, start, stop in spans:
            by_slot.setdefault(slot, []).append(np.arange(start, stop, dtype=np.int32))
        rows = {slot: np.concatenate(parts) for slot, parts in by_slot.items()}
        at, table = 0, self.table
        listed = table[1 + 3 * self.num_slots :]
        for number, (slot, own) in enumerate(rows.items()):
            table[1 + 3 * number : 4 + 3 * number] = slot, at, len(own)
            listed[at : at + len(own)] = own
            at += len(own)
        table[0] = len(rows)
        self.groups = tuple((slot, torch.from_numpy(own).long()) for slot, own in rows.items())


class LoraLayer:
    """What adapters in slots change of one linear layer, whose outputs are parts side by side.

    Args:
        rows: Of the step; shared by all layers.
        inputs: K.
        outputs: N of each part, as the checkpoint divides them.
        dtype: Of the rows, and so of the matrices.
        device: Where PyTorch computes.

    Attributes:
        packed: Whether kernels read the matrices, which are then in their order; set by the
            tracer of a step program.
        memory: The table of slots and parts that kernels read.
    """

    def __init__(
        self,
        rows: LoraRows,
        inputs: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.inputs, self.outputs = rows, inputs, tuple(outputs)
        self.packed = False
        self._dtype, self._device = dtype, device
        none: tuple[Prepared | None, ...] = (None,) * len(self.outputs)
        self._slots: list[tuple[Prepared | None, ...]] = [none] * rows.num_slots
        self.memory = allocate(rows.num_slots * len(self.outputs) * ENTRY.itemsize)
        self._table = self.memory.view(ENTRY).reshape(rows.num_slots, len(self.outputs))

    def prepare(self, factors: Factors) -> Prepared:
        """Matrices of one part as they are to be kept beside the model."""
        if not self.packed:
            down, up = (
                m.to(self._dtype, copy=True).contiguous() for m in (factors.down, factors.up)
            )
            return Factors(down, up, factors.scale)
        down, up = (m.to(self._dtype) for m in (factors.down, factors.up))
        whole = -(-self.inputs // 32) * 32  # as rows are padded
        per_word = _WORD // self._dtype.itemsize
        words = -(-factors.rank // per_word) * per_word
        return PackedFactors(_packed(down, whole), _packed(up, words), factors.rank, factors.scale)

    def load(self, slot: int, parts: Sequence[Prepared | None]) -> None:
        """Put an adapter into a slot; a part is None where it changes nothing."""
        entries = self._table[slot]
        placed: list[Prepared | None] = []
        for number, part in enumerate(parts):
            entries[number] = 0
            if isinstance(part, PackedFactors):
                addresses = part.down.ctypes.data, part.up.ctypes.data
                entries[number] = *addresses, part.rank, part.scale
                placed.append(part)
            else:
                placed.append(part and self._on_device(part))
        self._slots[slot] = tuple(placed)

    def _on_device(self, part: Factors) -> Factors:
        down, up = (m.to(self._device, non_blocking=True) for m in (part.down, part.up))
        return Factors(down, up, part.scale)

    def unload(self, slot: int) -> None:
        """Empty a slot."""
        self.load(slot, (None,) * len(self.outputs))

    def factors(self, slot: int) -> Sequence[Factors | None]:
        """What is in a slot, by part; for PyTorch."""
        found: list[Factors | None] = []
        for part in self._slots[slot]:
            assert not isinstance(part, PackedFactors), "a step program computes this layer"
            found.append(part)
        return found


def _packed(matrix: torch.Tensor, cols: int) -> Bytes:
    """Blocks of 16 rows (the last one padded with zeros), each word by word."""
    rows = -(-matrix.shape[0] // LANES) * LANES
    whole = F.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])).contiguous()
    words = whole.view(torch.int32).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
    memory = allocate(words.nbytes + _TILE_BYTES)[: words.nbytes]
    memory[:] = words.view(-1).view(torch.uint8).numpy()
    return memory
