"""The cache object for recurrent transformers models, backed by our pool of states.

Shapes: B requests of a group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sylvan.runtime.core.states import StatePool
from sylvan.runtime.models.config import StatePart

Kind = Literal["conv", "recurrent"]
StateKey = tuple[Kind, int, int]
"""Kind of a state, its layer, and its index among that layer's states."""


class _Cache:
    """The rest of transformers' cache interface; keys and values are stored elsewhere."""

    is_compileable = False

    def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return only the new keys and values: our attention finds the older ones."""
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always passed explicitly, so models do not use this."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As `get_seq_length`."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return sizes without effect: our attention takes no mask."""
        return query_length, 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are never rolled back here."""
        return False


class ProbeCache(_Cache):
    """Records which states a model has while it runs on a few tokens."""

    def __init__(self) -> None:
        self.states: dict[StateKey, StatePart] = {}

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: these are the first tokens."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """No state yet."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """No state yet."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See `Cache.update_conv_state` of transformers."""
        size = conv_kernel_size or conv_states.shape[-1]
        shape = (*conv_states.shape[1:-1], size)
        exact = conv_states.dtype is torch.float32
        self.states["conv", layer_idx, state_idx] = StatePart(shape, exact)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """See `Cache.update_recurrent_state` of transformers."""
        exact = recurrent_states.dtype is torch.float32
        part = StatePart(tuple(recurrent_states.shape[1:]), exact)
        self.states["recurrent", layer_idx, state_idx] = part
        return recurrent_states


@dataclass(slots=True)
class _Held:
    """A state of a group's requests, gathered from the pool. `tensor`: (B, ...)."""

    index: int
    tensor: torch.Tensor


class SlotCache(_Cache):
    """The states of some requests, gathered from their slots; `flush` writes them back."""

    def __init__(
        self, pool: StatePool, indices: dict[StateKey, int], slots_B: torch.Tensor
    ) -> None:
        self._pool, self._indices, self._slots_B = pool, indices, slots_B
        self._held: dict[StateKey, _Held] = {}

    def flush(self) -> None:
        """Write back all states that were read or updated."""
        for held in self._held.values():
            self._pool.part(held.index)[self._slots_B] = held.tensor

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: a zero state is the initial state."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The state; models that compute one token per request change it in place."""
        return self._get(("conv", layer_idx, state_idx)).tensor

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """As `get_conv_state`."""
        return self._get(("recurrent", layer_idx, state_idx)).tensor

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Append the new states, and keep the last ones."""
        held = self._get(("conv", layer_idx, state_idx))
        whole = torch.cat((held.tensor.to(conv_states.dtype), conv_states), -1)
        held.tensor = whole[..., -held.tensor.shape[-1] :]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace the states."""
        held = self._get(("recurrent", layer_idx, state_idx))
        held.tensor = recurrent_states.to(held.tensor.dtype)
        return recurrent_states

    def _get(self, key: StateKey) -> _Held:
        if key not in self._held:
            index = self._indices[key]
            self._held[key] = _Held(index, self._pool.part(index)[self._slots_B])
        return self._held[key]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive requests of a step that run together, with the same number of rows each.

    `save`: slots that receive their states afterwards, one per request, 0 for none.
    """

    rows: tuple[int, ...]
    reqs: tuple[int, ...]
    save: tuple[int, ...]


def groups(starts: list[int], saves: tuple[tuple[int, int, int], ...]) -> list[Group]:
    """Group requests with a single token; run others alone, divided where states are saved.

    Args:
        starts: First row of each request, and the end of the last.
        saves: See `StateWork.saves`.
    """
    wanted: dict[int, dict[int, int]] = {}
    for req, tokens, slot in saves:
        wanted.setdefault(req, {})[tokens] = slot
    found: list[Group] = []
    single: list[tuple[int, int, int]] = []
    for req, (start, stop) in enumerate(itertools.pairwise(starts)):
        kept = wanted.get(req, {})
        if stop - start == 1:
            single.append((start, req, kept.get(1, 0)))
            continue
        done = 0
        for end in sorted({*kept, stop - start}):
            rows = tuple(range(start + done, start + end))
            found.append(Group(rows, (req,), (kept.get(end, 0),)))
            done = end
    if single:
        rows, reqs, slots = zip(*single, strict=True)
        found.append(Group(rows, reqs, slots))
    return found
