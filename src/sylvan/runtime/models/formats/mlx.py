"""MLX's affine matrices: integers of 2 to 8 bits in groups of inputs, w = q scale + bias.

`NAME.weight` is uint32 words (N, K bits / 32), the first number in the lowest bits, without gaps;
`NAME.scales` and `NAME.biases` are (N, G). Embeddings and heads are stored alike. config.json has
`quantization` (mlx-lm; `quantization_config` says the same), with the names of layers that differ.
Layout: MLX 0.29, `mlx.core.quantize`.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.codes import paired
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.stored import Tensors, check_scales, unpacked

_WEIGHT, _SCALES, _BIASES = ".weight", ".scales", ".biases"
_BITS, _GROUPS = (2, 3, 4, 6, 8), (32, 64, 128)
_MIDDLE = 128


@dataclass(frozen=True, slots=True)
class Mlx:
    """Bits and group of most layers as stored, and those of the others by name."""

    size: int
    group: int
    layers: Mapping[str, tuple[int, int]]
    mixes: bool = True

    @property
    def name(self) -> str:
        return f"MLX, {self.size} bits in groups of {self.group}"

    @property
    def bits(self) -> int:
        return 4 if min(self.size, *(size for size, _ in self.layers.values()), 8) <= 4 else 8

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        stem = name.removesuffix(_WEIGHT)
        parts = name, stem + _SCALES, stem + _BIASES
        return parts if name.endswith(_WEIGHT) and parts[1] in there else (name,)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return False

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        words = tensor(parts[0])
        scale, bias = (check_scales(part, tensor(part)) for part in parts[1:])
        bits, group = self._of(name)
        if words.dtype not in (torch.uint32, torch.int32) or words.dim() != 2:
            raise ConfigError(
                f"{parts[0]!r} is {list(words.shape)} of {words.dtype}, not a matrix of uint32"
            )
        inputs = words.shape[1] * 32 // bits
        wanted = len(words), inputs // group
        if inputs % group or not inputs or scale.shape != wanted or bias.shape != wanted:
            raise ConfigError(
                f"{parts[0]!r} is {list(words.shape)}, {parts[1]!r} {list(scale.shape)} and "
                f"{parts[2]!r} {list(bias.shape)}, which are no {bits} bits in groups of {group}"
            )
        levels = unpacked(words.view(torch.int32), bits, 1)
        scale, shift = scale.float().contiguous(), bias.float().contiguous()
        if bits <= 4:
            return CodedWeight(paired(levels), scale, "uint4", group, shift=shift)
        return CodedWeight(levels, scale, "int8", group, shift=shift + _MIDDLE * scale)

    def _of(self, name: str) -> tuple[int, int]:
        stem = name.removesuffix(_WEIGHT)
        found = (size for layer, size in self.layers.items() if layer.endswith(stem))
        return next(found, (self.size, self.group))


def mlx(settings: Mapping[str, Any]) -> Mlx:
    """The format of mlx-lm's checkpoints.

    Raises:
        ConfigError: another mode, or sizes that there are none of; names the field.
    """
    layers = {
        name: _sizes(f"{name}.", part) for name, part in settings.items() if isinstance(part, dict)
    }
    return Mlx(*_sizes("", settings), layers)


def _sizes(where: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    mode = settings.get("mode", "affine")
    if mode != "affine":
        raise ConfigError(f"config.json: quantization.{where}mode is {mode!r}; affine can be read")
    bits, group = settings.get("bits"), settings.get("group_size")
    if bits not in _BITS or group not in _GROUPS:
        raise ConfigError(
            f"config.json: quantization.{where}bits is {bits!r} and group_size {group!r}; "
            f"{', '.join(map(str, _BITS))} bits in groups of {', '.join(map(str, _GROUPS))} can be "
            "read"
        )
    return bits, group
