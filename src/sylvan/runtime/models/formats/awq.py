"""AWQ in its GEMM layout, as AutoAWQ and AutoRound write it.

`qweight` (K, N / 8) and `qzeros` (G, N / 8) have eight outputs in an int32 word, in the order 0, 2,
4, 6, 1, 3, 5, 7, and `scales` are (G, N). Layout: AutoAWQ 0.2.9, `awq/utils/packing_utils.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.stored import (
    Tensors,
    check_scales,
    check_words,
    number,
    of_integers,
    unpacked,
)

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each output lies
_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Awq:
    """Four bits with zero points."""

    method: str
    group: int
    bits: int = 4

    @property
    def name(self) -> str:
        size = f"groups of {self.group}" if self.group > 0 else "a scale for each output"
        return f"{self.method}, 4 bits with zero points, {size}"

    @property
    def mixes(self) -> bool:
        return False

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        stem = name.removesuffix(_WEIGHT)
        if not name.endswith(_WEIGHT) or stem + ".qweight" not in there:
            return (name,)
        return stem + ".qweight", stem + ".qzeros", stem + ".scales"

    def idle(self, name: str, tensor: Tensors) -> bool:
        return False

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        words, packed = (check_words(part, tensor(part)) for part in parts[:2])
        scales = check_scales(parts[2], tensor(parts[2]))
        (inputs, blocks), groups = words.shape, len(packed)
        wanted = groups, blocks * 8
        if packed.shape != (groups, blocks) or scales.shape != wanted or inputs % groups:
            raise ConfigError(
                f"{parts[0]!r} is {list(words.shape)}, {parts[1]!r} {list(packed.shape)} and "
                f"{parts[2]!r} {list(scales.shape)}, which do not match"
            )
        levels, zero = (_outputs(part).T for part in (words, packed))
        group = 0 if groups == 1 else inputs // groups
        return of_integers(levels, scales.T, zero, 4, group=group)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Levels (K, N) of words (K, N / 8)."""
    return unpacked(words, 4, 1).unflatten(1, (-1, 8))[..., _ORDER].flatten(1)


def awq(settings: Mapping[str, Any]) -> Awq:
    """The format of `quant_method` awq, and of auto-round where it packs so.

    Raises:
        ConfigError: a layout or bits that are not known; names the field.
    """
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise ConfigError(
            f"config.json: quantization_config.version is {version!r}; only the GEMM layout of AWQ "
            "can be read, others are specific to one kernel"
        )
    bits = "w_bit" if "w_bit" in settings else "bits"
    number(settings, bits, (4,))
    group = "q_group_size" if "q_group_size" in settings else "group_size"
    method = "AWQ" if settings.get("quant_method") == "awq" else "AutoRound"
    return Awq(method, number(settings, group, _GROUPS))
