"""What a model is built with, and how a tensor is divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sylvan.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's place among `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        """How much of `total` this rank holds.

        Raises:
            ConfigError: `total` does not divide by the number of ranks.
        """
        if total % self.size:
            raise ConfigError(f"{what} ({total}) does not divide by {self.size} ranks")
        return total // self.size

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a whole tensor along `dim`; a view."""
        if self.size == 1:
            return tensor
        part = tensor.shape[dim] // self.size
        return tensor.narrow(dim, part * self.rank, part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """Everything besides the config that a model's constructor needs.

    `length` is the longest text to be served: positions are tabulated up to it.
    """

    dtype: torch.dtype
    length: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shard: Shard = Shard()

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """A parameter without contents; the loader fills it.

        Untouched memory is not resident, so a model that is never filled costs address space only.
        """
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.nn.Parameter(tensor, requires_grad=False)
