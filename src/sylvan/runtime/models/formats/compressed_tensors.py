"""The layouts of compressed-tensors, which llm-compressor and `sylvan quantize` write.

`NAME.weight` as int8 or float8 with `NAME.weight_scale` ("int-quantized", "float-quantized",
"naive-quantized"); or `NAME.weight_packed`, int32 words of levels of 2 to 8 bits, lowest first,
each raised to be unsigned, with `NAME.weight_scale` (N, groups) and `NAME.weight_shape`
("pack-quantized"); or bytes of two e2m1 numbers ("nvfp4-pack-quantized", "mxfp4-pack-quantized").
Zero points `NAME.weight_zero_point` are packed along the outputs. Layout: compressed-tensors 0.20.

Integers whose scheme rounds activations to 8 bits are multiplied so (`Int8Weight`, `Int4Weight`);
all others stand for numbers, and rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from sylvan.kernels.matmul.rounding import FP8_BLOCK, exponents_of, round_nvfp4
from sylvan.kernels.matmul.weights import (
    GROUP_SIZES,
    CodedWeight,
    Int4Weight,
    Int8Weight,
    QuantisedWeight,
)
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.fp8 import fp8, nvfp4
from sylvan.runtime.models.formats.microscaling import mxfp4, mxfp8
from sylvan.runtime.models.formats.stored import (
    Tensors,
    check_index,
    check_scales,
    check_whole,
    matches,
    of_integers,
    unpacked,
)
from sylvan.runtime.models.quantise import Format, Rounding

_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_POWERS = "mxfp8-quantized"
_SPARSE = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24")
_WORDS = ("pack-quantized",)
_NUMBERS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_SCALE, _PACKED, _SHAPE, _ZERO, _INDEX = (
    *("_scale", "_packed", "_shape"),
    *("_zero_point", "_g_idx"),
)
_GLOBAL = "_global_scale"
_IDLE = (
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale"),
    *("k_scale", "v_scale", "q_scale"),
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one group of layers is quantised."""

    targets: tuple[str, ...]
    kind: str  # int or float
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool
    rounds_rows: bool  # rows are rounded to 8 bits as well
    layout: str

    @property
    def name(self) -> str:
        """For people."""
        zeros = "" if self.symmetric else " with zero points"
        by = (
            f"groups of {self.group}"
            if self.strategy in ("group", "tensor_group")
            else self.strategy
        )
        rows = ", rows in int8" if self.rounds_rows and self.kind == "int" else ""
        return f"{self.kind}{self.bits}{zeros} by {by}{rows}"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """All schemes of a checkpoint; without any, its tensors identify the scheme."""

    schemes: tuple[Scheme, ...] = ()

    @property
    def name(self) -> str:
        return f"compressed-tensors, {' and '.join(scheme.name for scheme in self.schemes)}"

    @property
    def bits(self) -> int:
        return min((scheme.bits for scheme in self.schemes), default=8)

    @property
    def mixes(self) -> bool:
        return False

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        more = [name + end for end in (_ZERO, _INDEX, _GLOBAL) if name + end in there]
        if not self._of(name).symmetric and name + _ZERO not in more and name + _SCALE in there:
            more.append(name + _ZERO)
        if self._of(name).symmetric:
            more = [part for part in more if not part.endswith(_ZERO)]
        if name + _PACKED in there:
            shape = () if self._of(name).layout in _NUMBERS else (name + _SHAPE,)
            return name + _PACKED, name + _SCALE, *shape, *more
        if name + _SCALE in there and name in there:
            return name, name + _SCALE, *more
        return (name,)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(_IDLE)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> QuantisedWeight:
        scheme, ends = self._of(name), {part.removeprefix(name): part for part in parts}
        raw = tensor(parts[0])
        if scheme.layout in _NUMBERS:
            return _small_floats(parts, raw, tensor, ends.get(_GLOBAL))
        if scheme.layout == _POWERS:
            return mxfp8(parts, raw, tensor(parts[1]))
        scale = check_scales(parts[1], tensor(parts[1]))
        if scheme.kind == "float":
            return fp8(parts, raw, scale, scheme.block)
        if _PACKED in ends:
            shape = check_whole(ends[_SHAPE], tensor(ends[_SHAPE]), 2)
            levels, bits = _levels(parts, raw, shape, scheme.bits)
        else:
            levels, bits = _bytes(name, raw, scale), 8
        scale = _scales(parts[1], scale, scheme, levels)
        zero = None
        if _ZERO in ends:
            zero = _zeros(ends[_ZERO], tensor(ends[_ZERO]), bits, scale, packed=_PACKED in ends)
        if zero is None and scheme.rounds_rows and _INDEX not in ends:
            made, middle = (_in_groups, 8) if bits <= 4 else (_by_row, 128)
            if bits not in (4, 8):  # fewer bits use the middle of as many
                levels = levels + (middle - (1 << bits - 1))
            return made(name, levels, scale.float())
        order = None
        if _INDEX in ends:
            order = _order(ends[_INDEX], tensor(ends[_INDEX]), scale.shape[-1])
            levels = levels if order is None else levels[:, order.long()]
        group = _group(name, levels, scale)
        return of_integers(levels, scale, zero, bits, group=group, order=order)

    def _of(self, name: str) -> Scheme:
        """The scheme of a matrix; the first where none is said to be for it."""
        path = name.removesuffix(".weight")
        found = (s for s in self.schemes if any(matches(target, path) for target in s.targets))
        return next(found, self.schemes[0] if self.schemes else _OWN)


_OWN = Scheme(("Linear",), "int", 8, "channel", None, None, True, True, "")


def compressed_tensors(settings: Mapping[str, Any]) -> CompressedTensors:
    """The format of `quant_method` compressed-tensors.

    Raises:
        ConfigError: a scheme that there are no kernels for; says which.
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError("config.json: quantization_config has no config_groups")
    sparsity = settings.get("sparsity_config") or {}
    layout = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if layout not in ("dense", None):
        raise _sparse("sparsity_config.format", layout)
    return CompressedTensors(
        tuple(_scheme(name, group, settings.get("format")) for name, group in groups.items())
    )


def _sparse(field: str, layout: object) -> ConfigError:
    return ConfigError(
        f"config.json: quantization_config.{field} is {layout!r}; there are no kernels for sparse "
        "matrices"
    )


def _scheme(name: str, group: Any, layout: object) -> Scheme:
    group = group if isinstance(group, dict) else {}
    weights = group.get("weights") or {}
    layout = group.get("format") or layout
    if layout in _SPARSE:
        raise _sparse(f"config_groups.{name}.format", layout)
    kind, how = (str(weights.get(key)) for key in ("type", "strategy"))
    bits: Any = weights.get("num_bits")
    size, block = weights.get("group_size"), weights.get("block_structure")
    symmetric = bool(weights.get("symmetric", True))
    packed = how in ("channel", "group") and layout in _WORDS
    fits = {
        **{("int", size): packed for size in range(2, 8)},
        ("int", 8): how in ("channel", "tensor", "group") and layout in (*_PLAIN, *_WORDS),
        ("float", 8): (how in ("channel", "tensor", "block") and layout in _PLAIN and symmetric)
        or (how == "group" and layout == _POWERS and size == 32),
        ("float", 4): how in ("group", "tensor_group") and layout in _NUMBERS and symmetric,
    }.get((kind, bits), False)
    if how == "group" and (size not in (16, 32, 64, 128, 256, 512, 1024)):
        fits = False
    if how == "block" and (not isinstance(block, list) or len(block) != 2):
        fits = False
    if not fits:
        raise ConfigError(
            f"config.json: quantization_config.config_groups.{name}: weights are {kind!r} of "
            f"{bits} bits by {how!r} (group_size {size}, symmetric {symmetric}) in {layout!r}; "
            "there are kernels for integers of 2 to 8 bits by channel or group (of 16 to 1024 "
            "inputs), int8 by tensor, float 8 by tensor, channel or block, NVFP4, MXFP4 and MXFP8"
        )
    rows = group.get("input_activations")
    rounds = isinstance(rows, dict) and rows.get("num_bits") == 8 and rows.get("type") == "int"
    rounds = rounds and symmetric
    if how == "group":
        rounds = rounds and bits <= 4 and size in GROUP_SIZES
    targets = tuple(str(target) for target in group.get("targets") or ("Linear",))
    edges = (int(block[0]), int(block[1])) if isinstance(block, list) else None
    return Scheme(targets, kind, bits, how, size, edges, symmetric, rounds, str(layout))


def _levels(
    parts: Sequence[str], words: torch.Tensor, shape: Sequence[int], bits: int
) -> tuple[torch.Tensor, int]:
    """Levels from 0 on (N, K), and their bits: those of the scheme, 4 or 8."""
    rows, cols = shape
    if words.dtype != torch.int32 or words.dim() != 2 or len(words) != rows or rows < 1 or cols < 1:
        raise ConfigError(f"{parts[0]!r} is {list(words.shape)} of {words.dtype}, for {rows} rows")
    for size in (bits, 4, 8):
        if words.shape[1] == -(-cols * size // 32):
            return unpacked(words, size, 1, cols), size
    raise ConfigError(f"{parts[0]!r} is {list(words.shape)}, which is not {rows} x {cols}")


def _bytes(name: str, raw: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Levels from 0 on (N, K), of int8."""
    if raw.dtype != torch.int8 or raw.dim() != 2:
        raise ConfigError(
            f"{name!r} is {list(raw.shape)} of {raw.dtype} with {scale.numel()} scales; "
            "expected int8 with one scale a row"
        )
    return (raw.view(torch.uint8) ^ 128).clone()


def _scales(name: str, scale: torch.Tensor, scheme: Scheme, levels: torch.Tensor) -> torch.Tensor:
    """Scales (N, G) of as many groups as the scheme says."""
    rows, cols = levels.shape
    if scheme.strategy == "tensor" and scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1)
    wanted = [(rows, 1), (rows,)]
    if scheme.strategy == "group" and scheme.group:
        wanted = [(rows, -(-cols // scheme.group))]
    told = scheme is not _OWN and scheme.strategy in ("tensor", "channel", "group")
    if told and tuple(scale.shape) not in wanted:
        raise ConfigError(
            f"{name!r} is {list(scale.shape)}, but {rows} x {cols} numbers with a scale for each "
            f"{scheme.strategy} need {list(wanted[0])}"
        )
    return scale


def _zeros(
    name: str, found: torch.Tensor, bits: int, scale: torch.Tensor, *, packed: bool
) -> torch.Tensor:
    """Zero points from 0 on, of the shape of the scales."""
    kind = found.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise ConfigError(f"the zero points {name!r} are {kind}, not integers")
    if not scale.numel() or found.numel() % scale.shape[-1] or (packed and found.dim() != 2):
        raise ConfigError(
            f"{name!r} is {list(found.shape)}, but there are {list(scale.shape)} scales"
        )
    if packed and kind == torch.int32 and len(found) == -(-len(scale) * bits // 32):
        zero = unpacked(found, bits, 0, len(scale))
    else:
        zero = (found.reshape(-1, scale.shape[-1]).int() + (1 << bits - 1)).to(torch.uint8)
        zero = zero.expand(len(scale), -1) if len(zero) == 1 else zero
    if zero.shape != scale.shape:
        raise ConfigError(
            f"{name!r} is {list(found.shape)}, but there are {list(scale.shape)} scales"
        )
    return zero


def _order(name: str, of_input: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Inputs in the order in which groups lie together; None: they do."""
    of_input = check_index(name, of_input)
    if (of_input < 0).any():  # written so where there is no order
        return None
    where = torch.arange(len(of_input)) // -(-len(of_input) // groups)
    if of_input.equal(where):
        return None
    if not of_input.sort().values.equal(where):
        raise ConfigError(f"{name!r} does not divide {len(of_input)} inputs into {groups} groups")
    return of_input.argsort(stable=True).int()


def _group(name: str, levels: torch.Tensor, scale: torch.Tensor) -> int:
    """Inputs of a scale; 0: all of a row."""
    groups = scale.shape[1] if scale.dim() == 2 else 1
    if len(scale) != len(levels) or levels.shape[1] % groups:
        raise ConfigError(
            f"{name!r} is {list(levels.shape)} with scales {list(scale.shape)}; expected as many "
            "rows and groups that divide the inputs"
        )
    return 0 if groups == 1 else levels.shape[1] // groups


def _by_row(name: str, levels: torch.Tensor, scale: torch.Tensor) -> Int8Weight:
    if scale.numel() != len(levels):
        raise ConfigError(
            f"{name!r} is {list(levels.shape)} of int8 with {scale.numel()} scales; expected int8 "
            f"with one scale a row"
        )
    return Int8Weight((levels ^ 128).view(torch.int8), scale.flatten().contiguous())


def _in_groups(name: str, levels: torch.Tensor, scale: torch.Tensor) -> Int4Weight:
    cols, groups = levels.shape[1], scale.shape[1] if scale.dim() == 2 else 1
    group = cols // groups
    if groups == 1:  # one scale a row: the same as in the largest groups that divide it
        group = next((g for g in reversed(GROUP_SIZES) if cols % g == 0), 0)
        scale = scale.reshape(-1, 1).expand(-1, cols // group if group else 1)
    if group not in GROUP_SIZES or scale.shape != (len(levels), cols // group):
        raise ConfigError(f"{name!r} has {groups} scales a row of {cols} inputs; no kernel for it")
    q = levels[:, ::2] | levels[:, 1::2] << 4
    return Int4Weight(q, scale.contiguous(), group)


def _small_floats(
    parts: Sequence[str], raw: torch.Tensor, tensor: Tensors, second: str | None
) -> CodedWeight:
    scale = tensor(parts[1])
    if second is not None:
        whole = check_scales(second, tensor(second)).float()
        return nvfp4(parts, raw, check_scales(parts[1], scale), 1 / whole)
    return mxfp4(parts, raw, scale)


_BY_SCHEME: Mapping[Rounding, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "fp8-block": (_PLAIN[1], {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}),
        "mxfp8": (_POWERS, {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
        "mxfp4": (
            _NUMBERS[1],
            {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        ),
        "nvfp4": (
            _NUMBERS[0],
            {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        ),
    }
)
"""Layout, and what config.json says of weights."""


def stored_by_scheme(
    name: str, weight: QuantisedWeight, numbers: torch.Tensor, scheme: Rounding
) -> dict[str, torch.Tensor]:
    """The tensors that a matrix `name`, which was `numbers`, is written as."""
    assert isinstance(weight, CodedWeight)
    if scheme == "nvfp4":
        q, scale, whole = round_nvfp4(numbers)
        return {name + _PACKED: q, name + _SCALE: scale, name + _GLOBAL: whole}
    if scheme == "fp8-block":
        blocks = weight.scale[::FP8_BLOCK].contiguous()
        return {name: weight.q.view(torch.float8_e4m3fn), name + _SCALE: blocks}
    exponents = exponents_of(weight.scale)
    if scheme == "mxfp4":
        return {name + _PACKED: weight.q, name + _SCALE: exponents}
    return {name: weight.q.view(torch.float8_e4m3fn), name + _SCALE: exponents}


def quantization_config(wanted: Format, group: int | None, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` for tensors written by `stored_as`."""
    kind = "float" if wanted.code in ("fp8_e4m3", "fp4_e2m1") else "int"
    weights: dict[str, Any] = {"num_bits": wanted.bits, "type": kind, "symmetric": True}
    weights |= {"dynamic": False, "strategy": "channel" if wanted.bits == 8 else "group"}
    weights |= {"group_size": group}
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    layout = _WORDS[0] if wanted.bits == 4 else _PLAIN[kind == "float"]
    if wanted.scheme is not None:
        layout, more = _BY_SCHEME[wanted.scheme]
        weights |= more
    scheme = {"targets": ["Linear"], "weights": weights, "output_activations": None}
    scheme |= {"input_activations": None if wanted.code else rows, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": list(ignore),
    }


def stored_as(name: str, weight: QuantisedWeight) -> dict[str, torch.Tensor]:
    """The tensors that a matrix `name` (ending in `.weight`) is written as."""
    if isinstance(weight, Int8Weight):
        return {name: weight.q, name + _SCALE: weight.scale[:, None]}
    if isinstance(weight, CodedWeight) and weight.code == "fp8_e4m3":
        return {name: weight.q.view(torch.float8_e4m3fn), name + _SCALE: weight.scale}
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    words = weight.q.view(torch.int32)
    return {name + _PACKED: words, name + _SCALE: weight.scale, name + _SHAPE: shape}
