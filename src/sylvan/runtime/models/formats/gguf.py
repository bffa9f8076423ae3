"""GGUF: converts blocks of ggml to codes with scales, one tensor per matrix.

The lattice types IQ1 to IQ3 are in `gguf_grids`. Layouts: `ggml-quants.c` and gguf-py's
`quants.py`, which the tests compare with.

Shapes: N rows, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from sylvan.kernels.matmul.codes import Code, bits_of, paired
from sylvan.kernels.matmul.weights import CodedWeight, join
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.gguf_grids import (
    iq1_m,
    iq1_s,
    iq2_s,
    iq2_xs,
    iq2_xxs,
    iq3_s,
    iq3_xxs,
)
from sylvan.runtime.models.formats.stored import Tensors
from sylvan.runtime.models.gguf import GGUFWeights
from sylvan.runtime.models.stored import StoredTensor, WeightFiles

_ORDER = "order"
_PART_BYTES = 1 << 18  # converted at a time, so that intermediate results stay in the cache
_MIDDLE = 32  # of codes of 6 bits


class GgufBlocks:
    """The format of `KeptBlocks`."""

    name = "GGUF"
    bits = 4
    mixes = True

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        found = next((f"{name}.{kind}" for kind in KEPT if f"{name}.{kind}" in there), None)
        if found is None:
            return (name,)
        order = f"{name}.{_ORDER}"
        return (found, order) if order in there else (found,)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return False

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        kind = parts[0].rpartition(".")[2]
        size, make = KEPT[kind]
        blocks = tensor(parts[0]).unflatten(1, (-1, size))
        rows = max(1, _PART_BYTES // (blocks.shape[1] * size))
        weight = join([make(part) for part in blocks.split(rows)])
        assert isinstance(weight, CodedWeight)
        scales = weight.scale, weight.shift, weight.step, weight.shift_step
        if not all(part.isfinite().all() for part in scales if part is not None):
            raise ConfigError(f"the scales of {name!r} ({kind}) are not finite (NaN or infinity)")
        return replace(weight, order=tensor(parts[1])) if len(parts) > 1 else weight


class KeptBlocks:
    """A view of GGUF files that exposes matrices of known kinds as blocks: `NAME.KIND`, bytes.

    Only matrices of layers and the head; other tensors are plain numbers. If the file permutes the
    inputs of a matrix, `NAME.order` has their order. Shape of blocks: (N, B bytes of a block).
    """

    def __init__(self, files: GGUFWeights) -> None:
        self._files = files
        self._kept: dict[str, str] = {}
        self._orders: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, plain in files.tensors.items():
            kind, own = files.kind(name), plain
            if kind in KEPT and len(plain.shape) == 2 and name.endswith(".weight"):
                shape = plain.shape[0], (plain.stop - plain.start) // plain.shape[0]
                own = replace(plain, name=f"{name}.{kind}", dtype=torch.uint8, shape=shape)
                self._kept[own.name] = name
                if (order := files.order(name)) is not None:
                    place = f"{name}.{_ORDER}"
                    self._orders[place] = order
                    self.tensors[place] = replace(
                        own, name=place, dtype=order.dtype, shape=tuple(order.shape), stop=own.start
                    )
            self.tensors[own.name] = own

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        return self._files.num_bytes

    def tensor(self, name: str) -> torch.Tensor:
        """One of them."""
        if name in self._orders:
            return self._orders[name]
        if name in self._kept:
            return self._files.blocks(self._kept[name])
        return self._files.tensor(name)


def kept_blocks(files: WeightFiles) -> WeightFiles:
    """Wrap GGUF files in `KeptBlocks`; return other files unchanged."""
    return KeptBlocks(files) if isinstance(files, GGUFWeights) else files


def _half(raw: torch.Tensor) -> torch.Tensor:
    """Shape: (N, B, 2) bytes -> (N, B), float16."""
    return raw.contiguous().view(torch.float16).squeeze(-1)


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """Low nibbles of some bytes, then their high ones."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _made(
    levels: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, code: Code, group: int
) -> CodedWeight:
    q = levels.to(torch.uint8).flatten(1)
    q = q if bits_of(code) == 8 else paired(q)
    shift = None if shift is None else shift.float().flatten(1).contiguous()
    return CodedWeight(q.contiguous(), scale.flatten(1).contiguous(), code, group, None, shift)


_Counts = tuple[torch.Tensor, torch.Tensor]
"""Float16 steps of blocks (N, B), and how many of them each group has (N, B, groups)."""


def _stepped(
    levels: torch.Tensor, scales: _Counts, shifts: _Counts | None, code: Code, group: int
) -> CodedWeight:
    step, scale = scales
    made = _made(levels, scale.to(torch.int8), None, code, group)
    if shifts is None:
        return replace(made, step=step)
    least, shift = shifts
    return replace(made, shift=shift.to(torch.int8).flatten(1), step=step, shift_step=least)


def _q4_0(raw: torch.Tensor) -> CodedWeight:
    return _made(_halves(raw[..., 2:]), _half(raw[..., :2]), None, "int4", 32)


def _q4_1(raw: torch.Tensor) -> CodedWeight:
    scale, shift = _half(raw[..., :2]), _half(raw[..., 2:4])
    return _made(_halves(raw[..., 4:]), scale, shift, "uint4", 32)


def _fifth(raw: torch.Tensor) -> torch.Tensor:
    """The highest bit of 32 numbers of five. Shape: (N, B, 4) -> (N, B, 32)."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((raw[..., None] >> bits) & 1).flatten(-2)


def _q5_0(raw: torch.Tensor) -> CodedWeight:
    levels = _halves(raw[..., 6:]) | _fifth(raw[..., 2:6]) << 4
    return _made(levels + (_MIDDLE - 16), _half(raw[..., :2]), None, "int6", 32)


def _q5_1(raw: torch.Tensor) -> CodedWeight:
    levels = _halves(raw[..., 8:]) | _fifth(raw[..., 4:8]) << 4
    scale, shift = _half(raw[..., :2]), _half(raw[..., 2:4])
    return _made(levels + _MIDDLE, scale, shift, "int6", 32)


def _q8_0(raw: torch.Tensor) -> CodedWeight:
    return _made(raw[..., 2:] ^ 128, _half(raw[..., :2]), None, "int8", 32)


def _scales_of_k(raw: torch.Tensor) -> tuple[_Counts, _Counts]:
    """Scales and shifts of eight groups, from (N, B, 16) bytes."""
    step, least = _half(raw[..., :2]), _half(raw[..., 2:4])
    first, second, third = (raw[..., i : i + 4] for i in (4, 8, 12))
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    shift = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return (step, scale), (-least, shift)


def _q4_k(raw: torch.Tensor) -> CodedWeight:
    levels = _halves(raw[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return _stepped(levels, *_scales_of_k(raw[..., :16]), "uint4", 32)


def _q5_k(raw: torch.Tensor) -> CodedWeight:
    low = _halves(raw[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (raw[..., None, 16:48] >> bits) & 1
    levels = (low | high << 4).flatten(-2)
    return _stepped(levels + _MIDDLE, *_scales_of_k(raw[..., :16]), "int6", 32)


def _q6_k(raw: torch.Tensor) -> CodedWeight:
    low = raw[..., :128].unflatten(-1, (2, 2, 32))  # of 128 numbers: pairs of 32 bytes
    low = torch.cat((low & 15, low >> 4), -2)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    high = (raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    levels = (low | high << 4).flatten(-3)
    scales = _half(raw[..., 208:210]), raw[..., 192:208].contiguous().view(torch.int8)
    return _stepped(levels, scales, None, "int6", 16)


_PAIRS = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]


def _two_bits(raw: torch.Tensor) -> torch.Tensor:
    """Shape: (N, B, 64) bytes -> (N, B, 256); of 128 numbers the lowest bits first."""
    return ((raw.unflatten(-1, (2, 1, 32)) >> _PAIRS) & 3).flatten(-3)


def _q2_k(raw: torch.Tensor) -> CodedWeight:
    scales = _half(raw[..., 80:82]), raw[..., :16] & 15
    shifts = -_half(raw[..., 82:84]), raw[..., :16] >> 4
    return _stepped(_two_bits(raw[..., 16:80]), scales, shifts, "uint4", 16)


def _q3_k(raw: torch.Tensor) -> CodedWeight:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((raw[..., None, :32] >> bits) & 1).flatten(-2)
    levels = _two_bits(raw[..., 32:96]) + 4 * high + 4  # from -4 on, around 8
    low = torch.cat((raw[..., 96:104] & 15, raw[..., 96:104] >> 4), -1)
    upper = ((raw[..., None, 104:108] >> _PAIRS) & 3).flatten(-2)
    scales = _half(raw[..., 108:110]), (low | upper << 4).to(torch.int8) - 32
    return _stepped(levels, scales, None, "int4", 16)


def _iq4_nl(raw: torch.Tensor) -> CodedWeight:
    return _made(_halves(raw[..., 2:]), _half(raw[..., :2]), None, "iq4_nl", 32)


def _iq4_xs(raw: torch.Tensor) -> CodedWeight:
    levels = _halves(raw[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    low = ((raw[..., 4:8, None] >> torch.tensor((0, 4), dtype=torch.uint8)) & 15).flatten(-2)
    high = ((raw[..., 2:4, None] >> _PAIRS[:, 0]) & 3).flatten(-2)
    scales = _half(raw[..., :2]), (low | high << 4).to(torch.int8) - 32
    return _stepped(levels, scales, None, "iq4_nl", 32)


def _trits(raw: torch.Tensor, count: int) -> torch.Tensor:
    """As many numbers 0, 1, 2 of each byte, a fraction of 256 in base 3, by their place in it."""
    powers = torch.tensor([3**i for i in range(count)])[:, None]
    fraction = (raw.int()[..., None, :] * powers) & 255
    return (fraction * 3 >> 8).flatten(-2)


def _tq1_0(raw: torch.Tensor) -> CodedWeight:
    levels = torch.cat(
        (_trits(raw[..., :32], 5), _trits(raw[..., 32:48], 5), _trits(raw[..., 48:52], 4)), -1
    )
    return _made(levels + 7, _half(raw[..., 52:54]), None, "int4", 256)


def _tq2_0(raw: torch.Tensor) -> CodedWeight:
    return _made(_two_bits(raw[..., :64]) + 7, _half(raw[..., 64:66]), None, "int4", 256)


def _mxfp4(raw: torch.Tensor) -> CodedWeight:
    powers = torch.ldexp(torch.ones(raw.shape[:2]), raw[..., 0].int() - 127).bfloat16()
    return _made(_halves(raw[..., 1:]), powers, None, "fp4_e2m1", 32)


def _nvfp4(raw: torch.Tensor) -> CodedWeight:
    scale = (raw[..., :4] & 127).contiguous().view(torch.float8_e4m3fn).float()
    levels = _halves(raw[..., 4:].unflatten(-1, (4, 8))).flatten(-2)
    return _made(levels, scale.nan_to_num(0.0), None, "fp4_e2m1", 16)


KEPT: Mapping[str, tuple[int, Callable[[torch.Tensor], CodedWeight]]] = MappingProxyType(
    {
        "Q4_0": (18, _q4_0),
        "Q4_1": (20, _q4_1),
        "Q5_0": (22, _q5_0),
        "Q5_1": (24, _q5_1),
        "Q8_0": (34, _q8_0),
        "Q4_K": (144, _q4_k),
        "Q5_K": (176, _q5_k),
        "Q6_K": (210, _q6_k),
        "Q2_K": (84, _q2_k),
        "Q3_K": (110, _q3_k),
        "IQ4_NL": (18, _iq4_nl),
        "IQ4_XS": (136, _iq4_xs),
        "IQ3_XXS": (98, iq3_xxs),
        "IQ3_S": (110, iq3_s),
        "IQ2_XXS": (66, iq2_xxs),
        "IQ2_XS": (74, iq2_xs),
        "IQ2_S": (82, iq2_s),
        "IQ1_S": (50, iq1_s),
        "IQ1_M": (56, iq1_m),
        "TQ1_0": (54, _tq1_0),
        "TQ2_0": (66, _tq2_0),
        "MXFP4": (17, _mxfp4),
        "NVFP4": (36, _nvfp4),
    }
)
"""Bytes of a block, and the function that converts blocks (N, B, bytes) to codes, by kind."""
