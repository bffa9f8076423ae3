"""This rank's part of the tensors of a checkpoint, which always has them whole.

Dimensions are counted from the last one (-1), so that they mean the same in a stack of matrices and
in one matrix of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sylvan.kernels.matmul.weights import Int4Weight, Int8Weight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import SplitParameter
from sylvan.runtime.layers.mesh import Split

Splits = Mapping[int, Split]
NOT_SPLIT: Splits = {}


def splits_of(parameter: torch.Tensor) -> Splits:
    """How a parameter is divided among ranks."""
    return parameter.splits if isinstance(parameter, SplitParameter) else NOT_SPLIT


def of_source(splits: Splits, number: int, count: int) -> Splits:
    """The same for source `number` of the `count` that are joined in a parameter."""
    return {
        dim: Split(split.shares[number % count]) if len(split.shares) == count else split
        for dim, split in splits.items()
    }


def whole_shape(shape: Sequence[int], splits: Splits) -> tuple[int, ...]:
    """What a tensor of `shape` on this rank has in the checkpoint."""
    whole = list(shape)
    for dim, split in splits.items():
        whole[dim] = split.whole
    return tuple(whole)


def take(tensor: torch.Tensor, splits: Splits) -> torch.Tensor:
    """This rank's part; a view where it lies together, so that only that is read from a file."""
    for dim, split in splits.items():
        tensor = split.take(tensor, dim)
    return tensor


def take_quantised(
    name: str, weight: Int8Weight | Int4Weight, splits: Splits
) -> Int8Weight | Int4Weight:
    """The same of a quantised matrix, or of a stack.

    Raises:
        ConfigError: it is of another size, or the part begins or ends within a group of inputs.
    """
    for dim, split in splits.items():
        if weight.shape[dim] != split.whole:
            raise ConfigError(
                f"the quantised {name!r} has {list(weight.shape)}, but config.json implies "
                f"{split.whole} in dimension {dim}"
            )
        if dim == -1:
            weight = _columns(name, weight, split)
        elif isinstance(weight, Int8Weight):
            weight = Int8Weight(split.take(weight.q, -2), split.take(weight.scale, -1))
        else:
            q, scale = split.take(weight.q, -2), split.take(weight.scale, -2)
            weight = Int4Weight(q, scale, weight.group)
    return weight


def _columns(name: str, weight: Int8Weight | Int4Weight, split: Split) -> Int8Weight | Int4Weight:
    if isinstance(weight, Int8Weight):
        return Int8Weight(split.take(weight.q, -1).contiguous(), weight.scale)
    (share,) = split.shares
    if share.size % weight.group:
        raise ConfigError(
            f"the quantised {name!r} has inputs in groups of {weight.group}, and a rank would hold "
            f"{share.size} of {share.whole}; use fewer ranks"
        )
    pairs, groups = (
        slice(share.start // n, (share.start + share.size) // n) for n in (2, weight.group)
    )
    q, scale = weight.q[..., pairs].contiguous(), weight.scale[..., groups].contiguous()
    return Int4Weight(q, scale, weight.group)
