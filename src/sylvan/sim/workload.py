"""The workload: requests whose prompts are generated when they are sent.

A million prompts as lists of IDs do not fit into memory, so a prompt is a list of blocks, each a
seed and a length; prompts with the same first blocks share that prefix. Prompts that are known
exactly are one block of IDs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sylvan.config.objectives import Bounds, Latency

Ids = NDArray[np.int32]

KEPT_BLOCKS = 4096
_ODD, _MIX, _MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, (1 << 64) - 1  # constants of SplitMix64


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """A part of prompts: `length` IDs derived from `seed`.

    Attributes:
        seed: Equal seeds yield equal IDs, up to the shorter length.
        length: Number of IDs.
        shared: Whether other prompts contain it too.
    """

    seed: tuple[int, ...]
    length: int
    shared: bool = False


Part = PromptBlock | Ids


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One request.

    Attributes:
        parts: Parts of its prompt, or of the continuation of a conversation.
        output_tokens: Tokens to generate.
    """

    parts: Sequence[Part]
    output_tokens: int

    @property
    def length(self) -> int:
        """Number of tokens of the parts."""
        return sum(p.length if isinstance(p, PromptBlock) else len(p) for p in self.parts)


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    """Sequential turns; each repeats the history.

    Attributes:
        turns: At least one.
        due_s: When it starts.
    """

    turns: Sequence[SimulatedTurn]
    due_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """The whole workload.

    Attributes:
        conversations: In order of start.
        concurrency: Largest number of concurrent requests; None: no limit.
        warmup: Turns that are served before the measurement starts.
        slo: SLO limits that requests carry, for the scheduling policy `slo`.
    """

    conversations: Sequence[SimulatedConversation]
    concurrency: int | None = None
    warmup: Sequence[SimulatedTurn] = ()
    slo: Bounds = field(default_factory=dict[Latency, float])

    @property
    def num_requests(self) -> int:
        """Number of turns of all conversations."""
        return sum(len(each.turns) for each in self.conversations)


@dataclass(slots=True)
class SimulatedPrompts:
    """Generates the IDs of prompts; caches those of shared blocks."""

    _kept: dict[tuple[int, ...], Ids] = field(default_factory=dict[tuple[int, ...], Ids])

    def ids(self, parts: Sequence[Part]) -> Ids:
        """Return the IDs of a prompt."""
        found = [self._part(part) for part in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _part(self, part: Part) -> Ids:
        if not isinstance(part, PromptBlock):
            return part
        kept = self._kept.get(part.seed)
        if kept is not None and len(kept) >= part.length:
            return kept[: part.length]
        ids = drawn(part)
        if part.shared:
            if len(self._kept) >= KEPT_BLOCKS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[part.seed] = ids
        return ids


def drawn(block: PromptBlock) -> Ids:
    """Return the IDs of a block: a hash of seed and position, because generators start slowly."""
    state = 0
    for number in block.seed:
        state = (state + number + 1) * _ODD & _MASK
        state ^= state >> 29
    x = np.arange(block.length, dtype=np.uint64)
    x *= np.uint64(_ODD)
    x += np.uint64(state)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX)
    x >>= np.uint64(49)  # 15 bits are left
    return np.maximum(x, 2).astype(np.int32)
