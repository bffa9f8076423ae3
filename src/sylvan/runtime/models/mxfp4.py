"""Expands gpt-oss's MXFP4 experts to bfloat16, which represents every value exactly.

On CPUs they stay in MXFP4: see `formats.mxfp4`.

`NAME_blocks` (E, N, G, 16) are bytes of two 4-bit floats (E2M1), the lower half first; each group
of 32 has the power of two `NAME_scales` (E, N, G), an exponent raised by 127. Format: OCP
Microscaling Formats (MX) 1.0, as published with gpt-oss.

Shapes: E experts, N outputs, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.stored import StoredTensor, WeightFiles

_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_BYTES = 16  # of a group


class Unpacked:
    """Weight files that expose pairs of blocks and scales as plain tensors (E, inputs, outputs)."""

    def __init__(self, files: WeightFiles) -> None:
        """Find the pairs.

        Raises:
            ConfigError: blocks and scales do not match; names them.
        """
        self._files = files
        self._pairs: dict[str, tuple[str, str]] = {}
        found = dict(files.tensors)
        for blocks in [name for name in found if name.endswith(_BLOCKS)]:
            name = blocks.removesuffix(_BLOCKS)
            if (scales := name + _SCALES) not in found:
                raise ConfigError(f"the checkpoint has {blocks!r}, but not {scales!r}")
            parts = found.pop(blocks), found.pop(scales)
            self._pairs[name] = blocks, scales
            found[name] = _joined(name, *parts)
        self._tensors = found

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors by name; pairs have the name without its suffix."""
        return self._tensors

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        return self._files.num_bytes

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor; pairs give a new one, bfloat16 (E, 32 G, N)."""
        if name not in self._pairs:
            return self._files.tensor(name)
        blocks, scales = (self._files.tensor(part) for part in self._pairs[name])
        return unpack(blocks, scales).transpose(1, 2)


def has_blocks(files: WeightFiles) -> bool:
    """Whether there are MXFP4 blocks."""
    return any(name.endswith(_BLOCKS) for name in files.tensors)


def unpacked(files: WeightFiles) -> WeightFiles:
    """The same files, with pairs of blocks and scales as plain tensors."""
    return Unpacked(files) if has_blocks(files) else files


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode blocks. Shapes: uint8 (E, N, G, 16), uint8 (E, N, G) -> bfloat16 (E, N, 32 G)."""
    table = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=torch.bfloat16)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), -1)  # of each byte
    out = torch.empty((*blocks.shape[:-1], 2 * _BYTES), dtype=torch.bfloat16)
    for some, raw, power in zip(out, blocks, scales, strict=True):  # one expert's at a time
        values = pairs[raw.int()].flatten(-2)
        some.copy_(torch.ldexp(values, power.int()[..., None] - _BIAS))
    return out.flatten(-2)


def _joined(name: str, blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    fits = blocks.dtype == scales.dtype == torch.uint8 and len(blocks.shape) == 4
    if not fits or blocks.shape != (*scales.shape, _BYTES):
        raise ConfigError(
            f"{blocks.name!r} is {list(blocks.shape)} of {blocks.dtype} with scales "
            f"{list(scales.shape)} of {scales.dtype}; MXFP4 has 16 bytes for each scale"
        )
    experts, outputs, groups, _ = blocks.shape
    size = sum(part.stop - part.start for part in (blocks, scales))
    shape = experts, groups * 2 * _BYTES, outputs
    return StoredTensor(name, blocks.file, torch.bfloat16, shape, 0, size)
