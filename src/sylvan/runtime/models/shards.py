"""This rank's shards of checkpoint tensors, which are always stored whole.

Dimensions count from the last one (-1), so they mean the same in a stack of matrices and in a
single matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sylvan.kernels.matmul.weights import QuantisedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import SplitParameter
from sylvan.runtime.layers.mesh import IndexSelection, Split

Splits = Mapping[int, Split]
NOT_SPLIT: Splits = {}
_STACK = -3  # the dimension of the matrices of a stack


def splits_of(parameter: torch.Tensor) -> Splits:
    """How ranks shard a parameter."""
    return parameter.splits if isinstance(parameter, SplitParameter) else NOT_SPLIT


def of_source(splits: Splits, number: int, count: int) -> Splits:
    """The split of source `number` of the `count` sources that a parameter joins."""
    return {
        dim: _part(split, number % count) if len(split.shares) == count else split
        for dim, split in splits.items()
    }


def _part(split: Split, number: int) -> Split:
    return split if isinstance(split, IndexSelection) else Split(split.shares[number])


def of_each(splits: Splits) -> Splits:
    """The split of a single matrix of a stack."""
    return {dim: split for dim, split in splits.items() if dim > _STACK}


def expert_selection(splits: Splits) -> IndexSelection | None:
    """Which matrices of a stack this rank holds; None: all."""
    found = splits.get(_STACK)
    return found if isinstance(found, IndexSelection) else None


def whole_shape(shape: Sequence[int], splits: Splits) -> tuple[int, ...]:
    """Checkpoint shape of a tensor that has `shape` on this rank."""
    whole = list(shape)
    for dim, split in splits.items():
        whole[dim] = split.whole
    return tuple(whole)


def take(tensor: torch.Tensor, splits: Splits) -> torch.Tensor:
    """This rank's shard; a view if contiguous, so that only the shard is read from the file."""
    for dim, split in splits.items():
        tensor = split.take(tensor, dim)
    return tensor


def take_quantised(name: str, weight: QuantisedWeight, splits: Splits) -> QuantisedWeight:
    """This rank's shard of a quantised matrix or stack.

    Raises:
        ConfigError: its size differs, or the shard would cut a group of inputs.
    """
    for dim, split in splits.items():
        if weight.shape[dim] != split.whole:
            raise ConfigError(
                f"the quantised {name!r} has {list(weight.shape)}, but config.json implies "
                f"{split.whole} in dimension {dim}"
            )
        if dim == -1:
            weight = _columns(name, weight, split)
        elif dim == _STACK:
            weight = weight.like([split.take(part, 0) for part in weight.tensors])
        else:
            parts = zip(weight.tensors, weight.row_dims, strict=True)
            weight = weight.like([split.take(part, rows) for part, rows in parts])
    return weight


def _columns(name: str, weight: QuantisedWeight, split: Split) -> QuantisedWeight:
    if weight.column_multiple == 1:
        return weight.like([split.take(weight.tensors[0], -1).contiguous(), *weight.tensors[1:]])
    (share,) = split.shares
    if share.size % weight.column_multiple or share.start % weight.column_multiple:
        raise ConfigError(
            f"the quantised {name!r} has inputs in groups of {weight.column_multiple}, and a rank "
            f"would hold {share.size} of {share.whole}; use fewer ranks"
        )
    return weight.columns(share.start, share.start + share.size)
