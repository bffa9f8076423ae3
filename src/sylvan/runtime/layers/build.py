"""Build options: what a model's constructor needs besides its config."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sylvan.runtime.layers.mesh import ONE_RANK, Mesh, Split


class SplitParameter(torch.nn.Parameter):
    """A parameter that is sharded over ranks.

    Attributes:
        splits: Sharded dimensions, counted from the last one (-1).
    """

    splits: dict[int, Split]


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """Everything besides the config that a model's constructor needs.

    `length` is the maximum context length, and tables of positions end there. Rotary tables have
    `spare_positions` extra empty rows, for step rows with explicit positions. `mesh` describes the
    ranks that share the model. With `deferred`, matrices get memory only when they are loaded, so
    that a quantised model never takes the memory of the unquantised one.
    """

    dtype: torch.dtype
    length: int
    spare_positions: int = 0
    deferred: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: Mesh = ONE_RANK

    def empty(self, *sizes: int | Split) -> torch.nn.Parameter:
        """An uninitialised parameter, sharded along splits, for the loader to fill.

        Untouched memory is not resident, so an unfilled model costs address space only.
        """
        shape = [size.size if isinstance(size, Split) else size for size in sizes]
        device = "meta" if self.deferred and len(sizes) > 1 else self.device
        tensor = torch.empty(shape, dtype=self.dtype, device=device)
        splits = {
            dim - len(sizes): size
            for dim, size in enumerate(sizes)
            if isinstance(size, Split) and size.is_divided
        }
        if not splits:
            return torch.nn.Parameter(tensor, requires_grad=False)
        parameter = SplitParameter(tensor, requires_grad=False)
        parameter.splits = splits
        return parameter
