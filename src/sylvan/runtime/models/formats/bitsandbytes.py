"""Matrices of bitsandbytes: NF4 and FP4 in blocks, and int8 by row (LLM.int8).

Four bits: `NAME.weight` holds bytes of two codes, the first in the upper half, as one column (in
any type of storage), `NAME.weight.absmax` the largest magnitude of each block of the flattened
matrix, `NAME.weight.quant_map` the numbers of the codes, and
`NAME.weight.quant_state.bitsandbytes__nf4` (or `__fp4`) a JSON text with shape, block size and
types. With double quantisation magnitudes are bytes, which `NAME.weight.nested_quant_map` and
`NAME.weight.nested_absmax` decode. Eight bits: int8 (N, K) with `NAME.SCB` (N), the largest
magnitude of each row. Layout: bitsandbytes 0.50, `functional.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.codes import FP4_BNB, NF4, Code, paired
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.stored import Tensors, check_scales

_WEIGHT, _STATE = ".weight", ".quant_state.bitsandbytes__"
_NESTED = (".nested_absmax", ".nested_quant_map")
_KINDS: Mapping[str, tuple[Code, float]] = {"nf4": ("nf4", 1.0), "fp4": ("fp4_bnb", 12.0)}
_MIN_GROUP = 16
_TABLES = {
    "nf4": torch.tensor(NF4),
    "fp4": torch.tensor([*FP4_BNB, *(-x for x in FP4_BNB)]) / 12.0,
}
_STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
_BYTE = 127.0


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """`kind`: nf4, fp4 or int8, of most layers; their tensors identify the kind of each."""

    kind: str
    mixes: bool = True

    @property
    def bits(self) -> int:
        return 8 if self.kind == "int8" else 4

    @property
    def name(self) -> str:
        return f"bitsandbytes, {self.kind.upper()}" if self.bits == 4 else "bitsandbytes, int8"

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        stem = name.removesuffix(_WEIGHT)
        if not name.endswith(_WEIGHT):
            return (name,)
        if stem + ".SCB" in there:
            return name, stem + ".SCB"
        for kind in _KINDS:
            state = name + _STATE + kind
            if state in there:
                nested = tuple(name + end for end in _NESTED if name + end in there)
                return name, name + ".absmax", name + ".quant_map", state, *nested
        return (name,)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(".weight_format") and not tensor(name).any()

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        if len(parts) == 2:
            return _by_row(parts, tensor(parts[0]), tensor(parts[1]))
        kind = parts[3].rpartition("__")[2]
        state = _state(parts[3], tensor(parts[3]))
        rows, cols, size = state.shape[0], state.shape[1], state.block
        stored = tensor(parts[0])
        if stored.dtype not in _STORAGE:
            raise ConfigError(f"{parts[0]!r} is of {stored.dtype}, which stores no pairs of codes")
        raw = stored.contiguous().view(torch.uint8).flatten()
        group = math.gcd(cols, size)
        if raw.numel() * 2 != rows * cols or group < _MIN_GROUP:
            raise ConfigError(
                f"{parts[0]!r} has {raw.numel()} bytes, but its state is {rows} x {cols} in blocks "
                f"of {size}; expected two numbers a byte, and blocks that whole groups of at least "
                f"{_MIN_GROUP} inputs divide"
            )
        _check_table(parts[2], tensor(parts[2]), kind)
        most = _magnitudes(parts, tensor, state)
        if most.numel() != -(-rows * cols // size):
            raise ConfigError(
                f"{parts[1]!r} has {most.numel()} blocks of {size}, but {parts[0]!r} is {rows} x "
                f"{cols}"
            )
        codes = torch.stack((raw >> 4, raw & 15), -1).flatten().view(rows, cols)
        code, times = _KINDS[kind]
        scale = most.repeat_interleave(size // group)[: rows * cols // group] / times
        return CodedWeight(paired(codes), scale.view(rows, -1).contiguous(), code, group)


@dataclass(frozen=True, slots=True)
class _State:
    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


def _state(name: str, raw: torch.Tensor) -> _State:
    """Parse the JSON text of a matrix.

    Raises:
        ConfigError: It is not JSON, or has impossible values; names the tensor.
    """
    if raw.dtype != torch.uint8:
        raise ConfigError(f"{name!r} is of {raw.dtype}, not the bytes of a JSON text")
    try:
        said: Any = json.loads(bytes(raw.flatten().tolist()))
        rows, cols = (int(n) for n in said["shape"])
        block, nested = int(said["blocksize"]), int(said.get("nested_blocksize") or 0)
        offset = float(said.get("nested_offset") or 0.0)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name!r} is not a state of a quantised matrix: {error}") from None
    if min(rows, cols) < 1 or block < 1 or nested < 0 or not math.isfinite(offset):
        raise ConfigError(f"{name!r} says {rows} x {cols} in blocks of {block}, offset {offset}")
    return _State((rows, cols), block, nested, offset)


def _magnitudes(parts: Sequence[str], tensor: Tensors, state: _State) -> torch.Tensor:
    """The largest magnitude of each block, float32."""
    found = tensor(parts[1]).flatten()
    if len(parts) == 4:
        return check_scales(parts[1], found).float()
    if len(parts) != 6 or found.dtype != torch.uint8 or not state.nested_block:
        raise ConfigError(
            f"{parts[1]!r} is {found.dtype} with {len(parts) - 4} tensors for it; doubly quantised "
            "magnitudes are bytes with nested_absmax and nested_quant_map"
        )
    most, table = (check_scales(part, tensor(part)).float().flatten() for part in parts[4:])
    if table.numel() != 256 or most.numel() != -(-found.numel() // state.nested_block):
        raise ConfigError(
            f"{parts[4]!r} has {most.numel()} numbers and {parts[5]!r} {table.numel()}, for "
            f"{found.numel()} magnitudes in blocks of {state.nested_block}"
        )
    each = most.repeat_interleave(state.nested_block)[: found.numel()]
    return table[found.int()] * each + state.offset


def _check_table(name: str, found: torch.Tensor, kind: str) -> None:
    """Reject a code table that differs from the format's."""
    table = _TABLES[kind]
    same = found.is_floating_point() and found.numel() == len(table)
    if not same or not torch.allclose(found.float().flatten(), table, rtol=2**-8, atol=1e-6):
        raise ConfigError(f"the numbers {name!r} are not those of {kind.upper()}")


def _by_row(parts: Sequence[str], q: torch.Tensor, most: torch.Tensor) -> CodedWeight:
    if q.dtype != torch.int8 or q.dim() != 2 or most.numel() != len(q):
        raise ConfigError(
            f"{parts[0]!r} is {list(q.shape)} of {q.dtype} with {most.numel()} in {parts[1]!r}; "
            "expected int8 with one scale a row"
        )
    scale = check_scales(parts[1], most).float().reshape(-1, 1) / _BYTE
    return CodedWeight((q.view(torch.uint8) ^ 128).contiguous(), scale.contiguous(), "int8", 0)


def bitsandbytes(settings: Mapping[str, Any]) -> BitsAndBytes:
    """The format of `quant_method` bitsandbytes.

    Raises:
        ConfigError: It has neither 4 nor 8 bits, or an unknown kind of number.
    """
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return BitsAndBytes("int8")
    if not (settings.get("load_in_4bit") or settings.get("_load_in_4bit")):
        raise ConfigError(
            "config.json: quantization_config has neither load_in_4bit nor load_in_8bit"
        )
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if kind not in _KINDS:
        raise ConfigError(
            f"config.json: quantization_config.bnb_4bit_quant_type is {kind!r}; nf4 and fp4 can be "
            "read"
        )
    return BitsAndBytes(str(kind))
