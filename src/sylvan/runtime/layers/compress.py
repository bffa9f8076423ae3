"""Compressed KV entries, each for several tokens: weighted sums of projected rows (DeepSeek V4).

The weights of a column are an online softmax over the tokens of an entry: the state of a request
holds the largest logit, the sum of weights and the weighted sum, and tokens are added one after
another, so results do not depend on how a prompt is chunked. With overlap, an entry also reads the
tokens of the entry before it, through separate columns.

Shapes: T rows, D hidden, C columns of an entry, F fragments, E complete entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sylvan.kernels.api import LinearWeight, Rope, TracedTensor
from sylvan.kernels.compressed import EntryInputs, reference
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.layers.recurrent import Recurrent, spans_of, state_of

_NONE = -1e30  # a logit that weighs nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragments:
    """The rows of a step, cut where requests and entries end.

    Attributes:
        first_F: Index of the first row.
        count_F: Number of rows.
        entry_F: Index of the entry within the request.
        request_F: Index of the request.
        inherits_F: Whether an earlier step began the entry.
        follows_F: Whether the fragment before it holds the previous entry of the same request.
        done: Fragments that complete their entry.
        kept: States to save: fragment, its rows up to the state, slot, whether an entry ends there.
    """

    first_F: torch.Tensor
    count_F: torch.Tensor
    entry_F: torch.Tensor
    request_F: torch.Tensor
    inherits_F: torch.Tensor
    follows_F: torch.Tensor
    done: torch.Tensor
    kept: Sequence[tuple[int, int, int, bool]]


def fragments(batch: ForwardBatch, rate: int) -> Fragments:
    """Cut the rows of a step into fragments of entries of `rate` tokens."""
    spans, lengths = spans_of(batch), batch.kv_lens_R.tolist()
    saves = dict[int, list[tuple[int, int]]]()
    for request, rows, slot in spans.saves:
        saves.setdefault(request, []).append((rows, slot))
    parts: list[np.ndarray] = [np.zeros((6, 0), np.int64)]
    kept: list[tuple[int, int, int, bool]] = []
    found = 0
    for r, rows in enumerate(spans.lens):
        if not rows:
            continue
        start, position = spans.starts[r], lengths[r] - rows
        entry = np.arange(position // rate, (position + rows - 1) // rate + 1)
        first = np.maximum(entry * rate - position, 0)
        end = np.minimum((entry + 1) * rate - position, rows)
        inherits = (entry == entry[0]) & (position > 0)
        follows = entry > entry[0]
        parts.append(
            np.stack((start + first, end - first, entry, entry * 0 + r, inherits, follows))
        )
        for count, slot in (*saves.get(r, ()), (rows, spans.slots[r])):
            place = (position + count - 1) // rate - int(entry[0])
            ends = (position + count) % rate == 0
            kept.append((found + place, count - int(first[place]), slot, ends))
        found += len(entry)
    first, count, entry, request, inherits, follows = torch.from_numpy(np.concatenate(parts, 1)).to(
        batch.positions_T.device
    )
    last = torch.tensor(lengths, device=entry.device)[request]
    last = last - (torch.tensor(spans.starts, device=entry.device)[request + 1] - first - count)
    return Fragments(
        first_F=first,
        count_F=count,
        entry_F=entry,
        request_F=request,
        inherits_F=inherits.bool(),
        follows_F=follows.bool(),
        done=(last == (entry + 1) * rate).nonzero().flatten(),
        kept=kept,
    )


class Compressor(Recurrent):
    """Computes the entries that a step completes.

    Args:
        build: Build options.
        dim: D.
        rate: Tokens of an entry.
        state: Shape of its state: 2 with overlap or 1, 3, C.
        part: Number of its state.
        eps: Epsilon of the norm of entries.
    """

    ape: LinearWeight

    def __init__(
        self,
        build: Build,
        dim: int,
        rate: int,
        state: tuple[int, int, int],
        part: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.state_shapes = {part: state}
        self._part, self._rate = part, rate
        self.overlaps, self.width = state[0] > 1, state[2]
        columns = state[0] * self.width
        self.wkv = Linear(build, dim, (columns,), bias=False)
        self.wgate = Linear(build, dim, (columns,), bias=False)
        self.ape = replace(build, dtype=torch.float32).empty(rate, columns)
        self.norm = RMSNorm(build, self.width, eps)

    def traced(self, x: TracedTensor) -> EntryInputs:
        """The rows that entries sum, in a traced program."""
        return EntryInputs(
            values=self.wkv(x, out_f32=True),
            logits=self.wgate(x, out_f32=True),
            bias=self.ape,
            norm=self.norm.of_heads(),
            part=self._part,
            width=self.width,
            overlaps=self.overlaps,
        )

    def forward(
        self, x_TD: torch.Tensor, batch: ForwardBatch, cut: Fragments, rope: Rope
    ) -> torch.Tensor:
        """Return the completed entries, normed and rotated. Shape: float32 (E, C)."""
        value_TC = self.wkv(x_TD, out_f32=True)
        assert isinstance(self.ape, torch.Tensor)
        logit_TC = self.wgate(x_TD, out_f32=True) + self.ape[batch.positions_T.long() % self._rate]
        state_S = state_of(batch, self._part)
        slots = torch.tensor(spans_of(batch).slots, device=state_S.device)[cut.request_F]
        held_F = state_S[slots]
        held_F[~cut.inherits_F] = _empty(held_F)
        kept = torch.tensor([slot for _, _, slot, _ in cut.kept], device=state_S.device)
        ends = torch.tensor([end for _, _, _, end in cut.kept], device=state_S.device)
        ends = ends[:, None, None]
        if not self.overlaps:
            saved = _add(held_F[:, 0], logit_TC, value_TC, cut)
            state_S[kept] = torch.where(ends, _empty(saved), saved)[:, None]
            return self._entries(held_F[cut.done, 0], cut, rope)
        (value, mine), (logit, gate) = value_TC.chunk(2, -1), logit_TC.chunk(2, -1)
        early = held_F[:, 0]
        saved_early = _add(early, logit, value, cut)
        before = torch.cat((early[:1], early[:-1]))
        now = torch.where(cut.follows_F[:, None, None], before, held_F[:, 1])
        saved_now = _add(now, gate, mine, cut)
        empty = _empty(saved_early)
        state_S[kept] = torch.stack(
            (
                torch.where(ends, empty, saved_early),
                torch.where(ends, saved_early, saved_now),
            ),
            1,
        )
        return self._entries(now[cut.done], cut, rope)

    def _entries(self, sums_E3C: torch.Tensor, cut: Fragments, rope: Rope) -> torch.Tensor:
        entry_EC = self.norm((sums_E3C[:, 2] / sums_E3C[:, 1]).to(self.norm.weight.dtype))[0]
        positions_E = cut.entry_F[cut.done] * self._rate
        return reference.rotate_columns(entry_EC.float()[:, None], positions_E, rope)[:, 0]


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Sums of no tokens. Shape: (3, 1)."""
    return torch.tensor([[_NONE], [0.0], [0.0]], device=like.device)


def _add(
    sums_F3C: torch.Tensor, logit_TC: torch.Tensor, value_TC: torch.Tensor, cut: Fragments
) -> torch.Tensor:
    """Add the rows of all fragments to their sums; return the sums to keep, in their order."""
    saved = sums_F3C.new_empty(len(cut.kept), *sums_F3C.shape[1:])
    most = int(cut.count_F.max()) if len(cut.count_F) else 0
    wanted = dict[int, list[tuple[int, int]]]()
    for number, (fragment, rows, _, _) in enumerate(cut.kept):
        wanted.setdefault(rows, []).append((number, fragment))
    for step in range(most):
        open_n = (cut.count_F > step).nonzero().flatten()
        rows_n = cut.first_F[open_n] + step
        top, weights, total = sums_F3C[open_n].unbind(1)
        logit, value = logit_TC[rows_n], value_TC[rows_n]
        new = torch.maximum(top, logit)
        fade, weight = (top - new).exp(), (logit - new).exp()
        sums_F3C[open_n] = torch.stack(
            (new, weights * fade + weight, total * fade + weight * value), 1
        )
        if here := wanted.get(step + 1):
            numbers, chosen = zip(*here, strict=True)
            saved[list(numbers)] = sums_F3C[list(chosen)]
    return saved
