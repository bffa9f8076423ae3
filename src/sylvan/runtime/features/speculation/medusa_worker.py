"""Worker half of speculation with Medusa heads: drafts everything from the newest hidden states.

The heads keep no state, so moving or dropping a request's pages does not affect them.

Shapes: R requests, D hidden, W draftable tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from sylvan.runtime.core.step import StepResult
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.executor.options import Draw, ModelContext
from sylvan.runtime.features.speculation.head_control import HeadSpeculation
from sylvan.runtime.features.speculation.head_work import CHAIN, HeadReport, HeadWork, TreeShape
from sylvan.runtime.features.speculation.head_worker import Span, spans_of, spread
from sylvan.runtime.features.speculation.trees import Choice, combined, likeliest
from sylvan.runtime.models.medusa_heads import MedusaHeads
from sylvan.utils.clock import Clock, monotonic


class MedusaWorker(CapabilityWorker):
    """Drafts from the model's hidden states.

    Args:
        heads: One per additional token.
        draw: See `ModelContext.draw`.
        vocab_size: Vocabulary of the model.
        shape: Shape of draft trees.
        clock: Clock for drafting time.
    """

    name: ClassVar = HeadSpeculation.name

    def __init__(
        self,
        heads: MedusaHeads,
        draw: Draw,
        vocab_size: int,
        shape: TreeShape = CHAIN,
        clock: Clock = monotonic,
    ) -> None:
        self._heads, self._draw, self._vocab_size = heads, draw, vocab_size
        self._shape = shape
        self._clock = clock
        self._report = HeadReport()

    def after_forward(self, step: StepContext, work: HeadWork) -> Report:
        return lambda: self._report

    def after_result(self, step: StepContext, work: HeadWork, result: StepResult) -> None:
        """Report; a failure only costs drafts."""
        try:
            asking = [span for span in spans_of(step, work, result) if span.depth]
            self._report = self._draft(step, asking) if asking else HeadReport()
        except FAILURES as error:
            self._report = HeadReport(failure=f"{type(error).__name__}: {error}")

    def _draft(self, step: StepContext, asking: list[Span]) -> HeadReport:
        begun_s = self._clock()
        rows = np.array([span.rows[-1] for span in asking], np.int32)
        found: dict[int, list[int]] = {span.index: [] for span in asking}
        wide = self._shape.width > 1
        levels: dict[int, list[list[Choice]]] = {span.index: [] for span in asking}
        with torch.inference_mode():
            hidden_RD = step.hidden(rows)
            for head in range(min(len(self._heads), max(span.depth for span in asking))):
                which = [i for i, span in enumerate(asking) if span.depth > head]
                logits_RW = self._heads.logits(head, hidden_RD[which])
                slots = np.array([asking[i].slot for i in which], np.int32)
                ends = [asking[i].start + len(asking[i].tokens) for i in which]
                positions = np.array(ends, np.int32) + 1 + head
                ids = self._heads.token_ids
                drawn = self._draw(logits_RW.clone(), slots, positions, ids)
                for i, token in zip(which, drawn.tolist(), strict=True):
                    found[asking[i].index].append(token)
                if wide:
                    logits_RV = spread(logits_RW, ids, self._vocab_size)
                    every = likeliest(logits_RV, drawn, self._shape.width)
                    for i, choices in zip(which, every, strict=True):
                        levels[asking[i].index].append(choices)
        if wide:
            trees = {index: combined(some, self._shape.nodes) for index, some in levels.items()}
            drafts = {index: tokens for index, (tokens, _) in trees.items()}
            parents = {index: parents for index, (_, parents) in trees.items()}
            return HeadReport(drafts, self._clock() - begun_s, parents)
        drafts = {index: _possible(tokens) for index, tokens in found.items()}
        return HeadReport(drafts, self._clock() - begun_s)


def _possible(tokens: list[int]) -> list[int]:
    """Return the drafts up to the first that could not be sampled."""
    end = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
    return tokens[:end]


def medusa_worker(path: Path, shape: TreeShape = CHAIN) -> Callable[[ModelContext], MedusaWorker]:
    """Return the factory of the worker half for a model; it raises ConfigError as `MedusaHeads`."""

    def make(context: ModelContext) -> MedusaWorker:
        form = "auto" if context.load_format == "dummy" else context.load_format
        heads = MedusaHeads(path, context.config, context.build.dtype, form)
        return MedusaWorker(heads, context.draw, context.vocab_size, shape)

    return make
