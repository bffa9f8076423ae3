"""MXFP4 experts of gpt-oss, in their bits: `NAME_blocks` (E, N, G, 16) and `NAME_scales` (E, N, G).

Two 4-bit floats (E2M1) in a byte, the lower half first; each group of 32 has a power of two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.microscaling import powers_of
from sylvan.runtime.models.formats.stored import Tensors

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16


class Mxfp4:
    """The format of `quant_method` mxfp4."""

    name = "MXFP4 experts (e2m1 in groups of 32)"
    bits = 4
    mixes = False

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        both = name + _BLOCKS, name + _SCALES
        return both if both[0] in there or both[1] in there else (name,)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return False

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        """A stack (E, N, K), with outputs possibly in another order."""
        blocks, scales = (tensor(part) for part in parts)
        fits = blocks.dtype == scales.dtype == torch.uint8 and blocks.dim() == 4
        if not fits or blocks.shape != (*scales.shape, _BYTES):
            raise ConfigError(
                f"{parts[0]!r} is {list(blocks.shape)} of {blocks.dtype} with scales "
                f"{list(scales.shape)} of {scales.dtype}; MXFP4 has 16 bytes for each scale"
            )
        powers = powers_of(parts[1], scales).bfloat16()
        return CodedWeight(blocks.flatten(2), powers, "fp4_e2m1", 32)
