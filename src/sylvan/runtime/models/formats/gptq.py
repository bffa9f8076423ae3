"""GPTQ: `qweight`, `qzeros`, `scales` and `g_idx`, as GPTQModel, AutoGPTQ and AutoRound write them.

`qweight` (K bits / 32, N) has levels in int32 words along the inputs, `qzeros` (G, N bits / 32)
zero points along the outputs, `scales` (G, N), and `g_idx` (K) the group of each input. The layout
`gptq` holds zero points less one, `gptq_v2` as they are. Layout: GPTQModel 7.7.
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
    check_index,
    check_scales,
    check_words,
    number,
    of_integers,
    unpacked,
)

_BITS = (2, 3, 4, 8)
_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)
_LAYOUTS = {"gptq": 1, "gptq_v2": 0, "": 1}
_ROUNDED = {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}
_WEIGHT = ".weight"
_OTHERS = (".qzeros", ".scales", ".g_idx")


@dataclass(frozen=True, slots=True)
class Gptq:
    """A checkpoint's own bits; single layers may have others (`dynamic`, `extra_config`)."""

    method: str
    bits: int
    group: int
    less: int  # what was taken from zero points
    symmetric: bool
    ordered: bool

    @property
    def name(self) -> str:
        kind = "symmetric" if self.symmetric else "with zero points"
        order = ", inputs in order of their error" if self.ordered else ""
        size = f"groups of {self.group}" if self.group > 0 else "a scale for each output"
        return f"{self.method}, {self.bits} bits {kind}, {size}{order}"

    @property
    def mixes(self) -> bool:
        return False

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        stem = name.removesuffix(_WEIGHT)
        if not name.endswith(_WEIGHT) or stem + ".qweight" not in there:
            return (name,)
        others = _OTHERS if self.ordered or stem + ".g_idx" in there else _OTHERS[:-1]
        return stem + ".qweight", *(stem + other for other in others)

    def idle(self, name: str, tensor: Tensors) -> bool:
        """AutoGPTQ writes biases of zeros where there are none."""
        return name.endswith(".bias") and not tensor(name).any()

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        words, packed = (check_words(part, tensor(part)) for part in parts[:2])
        scales = check_scales(parts[2], tensor(parts[2]))
        outputs, groups = words.shape[1], len(packed)
        bits = self._bits(parts[1], words, packed)
        inputs = words.shape[0] * 32 // bits
        if scales.shape != (groups, outputs):
            raise ConfigError(
                f"{parts[2]!r} is {list(scales.shape)}, but {parts[0]!r} of {bits} bits implies "
                f"{[groups, outputs]}"
            )
        group, order = self._order(parts, tensor, inputs, groups)
        levels = unpacked(words, bits, 0).T
        if order is not None:
            levels = levels[:, order.long()]
        zero = unpacked(packed, bits, 1, outputs).T
        if self.less:
            zero = zero + 1 & (1 << bits) - 1
        group = 0 if groups == 1 and group >= inputs else group
        return of_integers(levels, scales.T, zero, bits, group=group, order=order)

    def _bits(self, name: str, words: torch.Tensor, packed: torch.Tensor) -> int:
        outputs = words.shape[1]
        for bits in (self.bits, *_BITS):  # layers may differ from what config.json says of most
            if packed.shape[1] == -(-outputs * bits // 32) and len(words) * 32 % bits == 0:
                return bits
        raise ConfigError(
            f"{name!r} is {list(packed.shape)}, which is no {self.bits} bits of {outputs} outputs"
        )

    def _order(
        self, parts: Sequence[str], tensor: Tensors, inputs: int, groups: int
    ) -> tuple[int, torch.Tensor | None]:
        """Inputs of a group, and the order in which groups lie together; None: as they are."""
        group = -(-inputs // groups)
        if len(parts) < 4:
            return group, None
        of_input = check_index(parts[3], tensor(parts[3]))
        where = torch.arange(inputs) // group
        if len(of_input) == inputs and of_input.equal(where):
            return group, None
        if len(of_input) != inputs or not of_input.sort().values.equal(where):
            raise ConfigError(
                f"{parts[3]!r} does not divide {inputs} inputs into {groups} groups of {group}"
            )
        return group, of_input.argsort(stable=True).int()


def gptq(settings: Mapping[str, Any]) -> Gptq:
    """The format of `quant_method` gptq.

    Raises:
        ConfigError: a layout that is not known; names the field.
    """
    layout = settings.get("checkpoint_format") or ""
    if layout not in _LAYOUTS:
        raise ConfigError(
            f"config.json: quantization_config.checkpoint_format is {layout!r}; gptq and gptq_v2 "
            "can be read, other layouts are those of single kernels"
        )
    return _made("GPTQ", settings, _LAYOUTS[layout])


def auto_round(settings: Mapping[str, Any]) -> Gptq:
    """The format of `quant_method` auto-round where it packs as GPTQ does.

    Raises:
        ConfigError: see `gptq`.
    """
    packing = settings.get("packing_format") or "auto_round:auto_gptq"
    if packing not in _ROUNDED:
        raise ConfigError(
            f"config.json: quantization_config.packing_format is {packing!r}; there is "
            f"{', '.join(_ROUNDED)} and auto_round:auto_awq"
        )
    return _made("AutoRound", settings, _ROUNDED[packing])


def _made(method: str, settings: Mapping[str, Any], less: int) -> Gptq:
    bits, group = number(settings, "bits", _BITS), number(settings, "group_size", _GROUPS)
    symmetric = bool(settings.get("sym", True))
    return Gptq(method, bits, group, less, symmetric, bool(settings.get("desc_act")))
