"""Pools the hidden states of a request's tokens, slice by slice.

Shapes: n rows of one slice, D hidden, S tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.protocol.arrays import FloatArray, IntArray
from sylvan.runtime.executor.capability import StepContext
from sylvan.runtime.features.embeddings.control import PoolSlice
from sylvan.runtime.models.pooling import Mode, PoolingSpec

Head = Callable[[torch.Tensor], torch.Tensor]
"""Pooled vectors (1, D) -> logits of the labels (1, C)."""


@dataclass(slots=True)
class _Sum:
    """The partial sum of a text that was computed in part."""

    total: NDArray[np.float64] | None = None
    weight: float = 0.0
    first: FloatArray | None = None
    most: FloatArray | None = None
    rows: int = 0


@dataclass(slots=True)
class Pooler:
    """Keeps the sums of unfinished texts, by request slot.

    Sums are accumulated row by row in float64, so they do not depend on how a text was split.
    With `labels`, the model's head maps the pooled vector to one logit per label; `head` is
    needed unless pooling takes the last token's vector.
    """

    spec: PoolingSpec
    labels: bool = False
    head: Head | None = None
    _sums: dict[int, _Sum] = field(default_factory=dict[int, _Sum])
    _rows: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])

    def add(
        self, step: StepContext, slot: int, rows: IntArray, work: PoolSlice
    ) -> FloatArray | None:
        """Add the rows of a slice; return the embedding once the text is complete."""
        if work.form != "text" or work.spans:
            return self._add_rows(step, slot, rows, work)
        if self.spec.reads_all:
            words = self.spec.pools_logits
            read = step.logits(rows).relu().log1p() if words else step.hidden(rows)
            self._add(slot, read, work.start)
        if not work.done:
            return None
        if self.labels and not self.spec.reads_all:
            return step.logits(rows[-1:])[0].float().cpu().numpy().copy()
        found = self._sums.pop(slot, _Sum())
        last = step.hidden(rows[-1:])[0]
        parts = [_pooled(mode, found, last) for mode in self.spec.modes]
        vector = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self._finished(vector, work).numpy()

    def of_item(self, vector: FloatArray, work: PoolSlice) -> FloatArray:
        """Return the embedding of an item with a vector of its own, float32 (D,)."""
        found = torch.from_numpy(vector)
        found = found[: work.dimensions] if work.dimensions else found
        if self.spec.normalize and work.normalize:
            found = found / found.norm().clamp_min(1e-12)
        return found.numpy().copy()

    def forget(self, slot: int) -> None:
        """Drop the request in a slot."""
        self._sums.pop(slot, None)
        self._rows.pop(slot, None)

    def _add_rows(
        self, step: StepContext, slot: int, rows: IntArray, work: PoolSlice
    ) -> FloatArray | None:
        """Store the vectors of a slice; results are computed once, for the whole text."""
        read = step.hidden(rows).cpu()
        if work.form == "steps":
            read = read[torch.tensor(work.ids) == self.spec.tokens.step_token]
        if work.start == 0:
            self._rows[slot] = []
        self._rows[slot].append(read.float().clone())
        if not work.done:
            return None
        return self._of_tokens(torch.cat(self._rows.pop(slot)), work).numpy()

    def _of_tokens(self, rows_SD: torch.Tensor, work: PoolSlice) -> torch.Tensor:
        heads = self.spec.tokens
        if work.spans:
            return self._of_spans(rows_SD, work)
        if work.form == "steps":
            assert self.head is not None, "labels of steps need the head"
            found = [self.head(row_D[None]).float().cpu() for row_D in rows_SD]
            labels = torch.cat(found) if found else torch.zeros(0, self.spec.size)
            return labels.softmax(-1)
        if work.form == "weights":
            assert heads.weights is not None, "a form that the model does not make"
            return heads.weights(rows_SD)
        rows_SD = rows_SD[1:] if heads.skips_first else rows_SD
        for transform in heads.transforms:
            rows_SD = transform(rows_SD)
        rows_SD = rows_SD[:, : work.dimensions] if work.dimensions else rows_SD
        if heads.normalize and work.normalize:
            rows_SD = rows_SD / rows_SD.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return rows_SD.contiguous()

    def _of_spans(self, rows_SD: torch.Tensor, work: PoolSlice) -> torch.Tensor:
        """The mean of each span, summed row by row as for whole texts. Shape: (spans, D)."""
        wide = rows_SD.numpy().astype(np.float64)
        means = [
            np.add.reduce(wide[start:stop], axis=0) / (stop - start) for start, stop in work.spans
        ]
        vectors = [torch.from_numpy(mean.astype(np.float32)) for mean in means]
        return torch.stack([self._finished(vector, work) for vector in vectors])

    def _add(self, slot: int, hidden: torch.Tensor, start: int) -> None:
        rows = hidden.cpu().numpy()
        if start == 0:
            self._sums[slot] = _Sum(first=rows[0].copy())
        found, modes = self._sums[slot], self.spec.modes
        assert found.rows == start, "a text is pooled from its first token on"
        if "max" in modes or "splade" in modes:
            top = rows.max(0)
            found.most = top if found.most is None else np.maximum(found.most, top)
        if any("mean" in mode for mode in modes):
            wide = rows.astype(np.float64)
            if "weightedmean" in modes:
                wide *= np.arange(start + 1, start + 1 + len(rows))[:, None]
            if found.total is not None:
                wide = np.vstack([found.total, wide])
            found.total = np.add.reduce(wide, axis=0)  # one row after another
        found.rows += len(rows)

    def _finished(self, vector: torch.Tensor, work: PoolSlice) -> torch.Tensor:
        if self.labels:
            assert self.head is not None, "labels of pooled vectors need the head"
            return self.head(vector[None])[0].cpu()
        for transform in self.spec.transforms:
            vector = transform(vector)
        vector = vector[: work.dimensions] if work.dimensions else vector
        if self.spec.normalize and work.normalize:
            vector = vector / vector.norm().clamp_min(1e-12)
        return vector


def _pooled(mode: Mode, found: _Sum, last: torch.Tensor) -> torch.Tensor:
    if mode == "last":
        return last.float().cpu()
    if mode in ("cls", "max", "splade"):
        vector = found.first if mode == "cls" else found.most
        assert vector is not None
        return torch.from_numpy(vector)
    assert found.total is not None
    n = found.rows
    weight = {"mean": n, "mean_sqrt_len": n**0.5, "weightedmean": n * (n + 1) / 2}[mode]
    return torch.from_numpy((found.total / weight).astype(np.float32))
