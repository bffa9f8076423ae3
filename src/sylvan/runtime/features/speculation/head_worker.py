"""Worker half of speculation with a draft head: reads the model's hidden states, and drafts.

The head's KV is stored beside the model's, at the same offsets of pages with the same numbers. So a
cached prefix includes the head's KV.

Shapes: T rows, R requests, F features read from the model, W draftable tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.memory import copy_tokens
from sylvan.runtime.core.step import SliceOutput, StepResult
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.executor.graphs.head_program import HeadProgram
from sylvan.runtime.executor.options import Draw
from sylvan.runtime.executor.verify import path_of
from sylvan.runtime.features.speculation.head_tree import TreeDrafter
from sylvan.runtime.features.speculation.head_work import HeadReport, HeadWork
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.utils.clock import Clock, monotonic

MAX_PUT_OFF = 64
"""Positions of a request that are deferred and read together while it has no drafts."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of the step that the head must read, all of one request.

    Attributes:
        index: Index of the slice.
        slot: Slot of the request.
        start: Position of the first row.
        rows: Rows of the step.
        tokens: The token after each row.
        depth: Requested draft depth.
        urgent: It may soon be shared through the cache: it is more than the newest token.
    """

    index: int
    slot: int
    start: int
    rows: IntArray
    tokens: IntArray
    depth: int
    urgent: bool


@dataclass(slots=True)
class _DeferredPositions:
    """Positions of a request that the head has not read yet.

    Attributes:
        start: The first position.
        tokens: The token after each, in parts.
        columns: Features of each (n, F), in parts.
    """

    start: int
    tokens: list[IntArray]
    columns: list[torch.Tensor]

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + sum(map(len, self.tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnableHead:
    """A loaded draft head.

    Attributes:
        program: Its program.
        batch: Its buffers; its pool has the pages of the model's first KV group, then `spare` pages
            per request slot for KV of drafts, then those of `trees`.
        spare: Spare pages per slot.
        first_spare: The first spare page.
        read_layers: Layers of the model whose outputs it reads; empty: output of the final norm.
        token_ids: IDs of the draftable tokens, int64 (W,); None: all, in order.
        vocab_size: Vocabulary of the model.
        trees: Grows draft trees; None: drafts are chains.
    """

    program: HeadProgram
    batch: ForwardBatch
    spare: int
    first_spare: int
    read_layers: tuple[int, ...]
    token_ids: torch.Tensor | None
    vocab_size: int
    trees: TreeDrafter | None = None


class HeadWorker(CapabilityWorker):
    """Runs a draft head.

    Args:
        head: The head.
        draw: Samples drafts.
        clock: Clock for the report.
    """

    name: ClassVar = "speculation"

    def __init__(self, head: RunnableHead, draw: Draw, clock: Clock = monotonic) -> None:
        self._head, self._program, self._batch = head, head.program, head.batch
        self._draw, self._clock = draw, clock
        self.hidden_layers = head.read_layers
        pages = head.batch.kv.groups[0]
        assert isinstance(pages, PagedBuffer)
        self.mirrored_pages = pages
        self._report = HeadReport()
        self._put_off: dict[int, _DeferredPositions] = {}  # by slot

    def leave(self, slot: int) -> None:
        self._put_off.pop(slot, None)

    def before_forward(self, step: StepContext, work: HeadWork) -> None:
        copies = [copy for copy in step.plan.copies if copy.group == 0]
        if copies:
            copy_tokens(self._batch.kv.groups, copies)

    def after_forward(self, step: StepContext, work: HeadWork) -> Report:
        return lambda: self._report

    def after_result(self, step: StepContext, work: HeadWork, result: StepResult) -> None:
        """Report; a failure only costs drafts."""
        try:
            self._report = self._follow(step, work, result)
        except FAILURES as error:
            self._report = HeadReport(failure=f"{type(error).__name__}: {error}")

    def _follow(self, step: StepContext, work: HeadWork, result: StepResult) -> HeadReport:
        with torch.inference_mode():
            spans = self._select_urgent(step, spans_of(step, work, result))
            if not spans:
                return HeadReport()
            self._map_pages(step, spans)
            parts = [self._read(step, part) for part in self._parts(spans)]
            logits_RW, hidden_RD = parts[-1]
            if len(parts) > 1:
                logits_RW, hidden_RD = (torch.cat(every) for every in zip(*parts, strict=True))
            begun_s = self._clock()
            drafts, parents = self._grow(spans, logits_RW, hidden_RD)
        return HeadReport(drafts, self._clock() - begun_s, parents)

    def _select_urgent(self, step: StepContext, spans: Sequence[Span]) -> Sequence[Span]:
        """Defer what is not urgent; return what must be read now."""
        due: list[Span] = []
        for span in spans:
            put_off = self._put_off.get(span.slot)
            if put_off is None or put_off.stop != span.start:  # after its memory was lost
                put_off = self._put_off[span.slot] = _DeferredPositions(span.start, [], [])
            count = span.start + len(span.tokens) - put_off.start
            if span.depth or span.urgent or count > MAX_PUT_OFF:
                due.append(span)
            else:
                put_off.tokens.append(span.tokens)
                put_off.columns.append(self._columns(step, span.rows))
        return due

    def _parts(self, spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
        """Yield as many parts as the buffers hold, in order."""
        part: list[Span] = []
        total = 0
        for span in spans:
            count = span.start + len(span.tokens) - self._put_off[span.slot].start
            if part and total + count > self._batch.limits.max_tokens:
                yield part
                part, total = [], 0
            part.append(span)
            total += count
        yield part

    def _map_pages(self, step: StepContext, spans: Sequence[Span]) -> None:
        """Map the model's pages as far as the step has computed, then the spare pages."""
        table_SP = self._batch.host.page_tables[0]
        theirs_SP = step.batch.host.page_tables[0]
        stops, size = step.plan.stops, self._batch.kv.page_size
        for span in spans:
            count = -(-int(stops[span.index]) // size)
            row_P, first = (
                table_SP[span.slot],
                self._head.first_spare + span.slot * self._head.spare,
            )
            row_P[:count] = theirs_SP[span.slot, :count]
            room = row_P[count : count + self._head.spare]
            room[:] = np.arange(first, first + len(room))

    def _read(self, step: StepContext, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read rows of the step and deferred ones; return logits and vectors of first drafts."""
        starts: list[int] = []
        counts: list[int] = []
        tokens: list[IntArray] = []
        columns: list[torch.Tensor] = []
        for span in spans:
            late = self._put_off.pop(span.slot)
            tokens += [*late.tokens, span.tokens]
            columns += [*late.columns, self._columns(step, span.rows)]
            starts.append(late.start)
            counts.append(span.start + len(span.tokens) - late.start)
        starts_R, counts_R = np.array(starts, np.int32), np.array(counts, np.int32)
        slots_R = np.array([span.slot for span in spans], np.int32)
        ends_R = np.cumsum(counts_R, dtype=np.int32)
        total = int(ends_R[-1])
        positions_T = np.arange(total, dtype=np.int32)
        positions_T += np.repeat(starts_R - (ends_R - counts_R), counts_R)
        host = self._batch.host
        host.input_ids[:total] = np.concatenate(tokens)
        self._place(slots_R, counts_R, positions_T, starts_R + counts_R)
        wanted = np.array([span.depth > 0 for span in spans])
        host.sample_rows[: wanted.sum()] = ends_R[wanted] - 1
        self._count(total, len(spans), int(wanted.sum()))
        logits_RW, hidden_RD = self._program.extend(torch.cat(columns))
        return logits_RW.clone(), hidden_RD.clone()

    def _columns(self, step: StepContext, rows: IntArray) -> torch.Tensor:
        """Return the features that the head reads at some rows, (T, F)."""
        layers = self._head.read_layers
        if not layers:
            return step.hidden(rows)
        return torch.cat([step.layer_hidden(layer, rows) for layer in layers], 1)

    def _grow(
        self, spans: Sequence[Span], logits_RW: torch.Tensor, hidden_RD: torch.Tensor
    ) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Draft for all slices that request it; return drafts, and parents of trees."""
        asking = [span for span in spans if span.depth]
        trees = self._head.trees
        if trees is None or not asking:
            return self._draft_chains(asking, logits_RW, hidden_RD), {}
        some, others = asking[: trees.limit], asking[trees.limit :]
        found = trees.grow(
            [(span.slot, span.start + len(span.tokens), span.depth) for span in some],
            (logits_RW[: len(some)], hidden_RD[: len(some)]),
            self._run_next,
            self._draw_spread,
        )
        parents = {span.index: tree[1] for span, tree in zip(some, found, strict=True)}
        drafts = {span.index: tree[0] for span, tree in zip(some, found, strict=True)}
        if others:
            drafts |= self._draft_chains(others, logits_RW[len(some) :], hidden_RD[len(some) :])
        return drafts, parents

    def _run_next(
        self, hidden_FD: torch.Tensor, ids: IntArray, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass over drafts, each at its position in a row of the page table.

        Returns: Logits and vectors, views that are valid until the next pass.
        """
        count, host = len(ids), self._batch.host
        host.input_ids[:count] = ids
        self._place(rows, np.ones(count, np.int32), positions, positions + 1)
        host.sample_rows[:count] = np.arange(count)
        self._count(count, count, count)
        return self._program.predict_next(hidden_FD)

    def _draw_spread(
        self, logits_FW: torch.Tensor, slots: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, IntArray]:
        logits_FV = spread(logits_FW, self._head.token_ids, self._head.vocab_size)
        return logits_FV, self._draw(logits_FV.clone(), slots, positions)

    def _draft_chains(
        self, asking: Sequence[Span], logits_RW: torch.Tensor, hidden_RD: torch.Tensor
    ) -> dict[int, list[int]]:
        """Draft chains for all slices that still want a token."""
        found: dict[int, list[int]] = {span.index: [] for span in asking}
        positions = np.array([span.start + len(span.tokens) for span in asking], np.int32)
        while asking:
            slots = np.array([span.slot for span in asking], np.int32)
            drawn = self._draw(logits_RW, slots, positions + 1, self._head.token_ids)
            for span, token in zip(asking, drawn.tolist(), strict=True):
                found[span.index].append(token)
            going = np.array(
                [len(found[s.index]) < s.depth and found[s.index][-1] >= 0 for s in asking]
            )
            asking = [span for span, goes in zip(asking, going, strict=True) if goes]
            if not asking:
                break
            if not going.all():
                positions, drawn, slots = positions[going], drawn[going], slots[going]
                hidden_RD = hidden_RD[torch.from_numpy(going)]
            logits_RW, hidden_RD = self._run_next(hidden_RD, drawn, slots, positions)
            positions = positions + 1
        return {index: [t for t in tokens if t >= 0] for index, tokens in found.items()}

    def _place(
        self, slots_R: IntArray, counts_R: IntArray, positions_T: IntArray, lens_R: IntArray
    ) -> None:
        """Set positions and pages of a pass's rows."""
        host, count = self._batch.host, len(slots_R)
        host.positions[: len(positions_T)] = positions_T
        host.q_starts[0] = 0
        host.q_starts[1 : count + 1] = np.cumsum(counts_R)
        host.kv_lens[:count], host.req_slots[:count] = lens_R, slots_R
        host.map_slots(np.repeat(slots_R, counts_R), positions_T, self._batch.kv.page_size)

    def _count(self, tokens: int, reqs: int, samples: int) -> None:
        batch = self._batch
        batch.num_tokens, batch.num_reqs, batch.num_samples = tokens, reqs, samples


def spread(logits_RW: torch.Tensor, ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Expand logits to all tokens; those that cannot be drafted are impossible.

    Args:
        logits_RW: Float32.
        ids: IDs of the draftable tokens, int64 (W,); None: all.
        vocab_size: Of the model.
    """
    if ids is None:
        return logits_RW
    whole_RV = torch.full((len(logits_RW), vocab_size), -torch.inf, dtype=torch.float32)
    return whole_RV.index_copy_(1, ids, logits_RW)


class NoHeadWorker(CapabilityWorker):
    """Replaces the head on other ranks; only the first rank drafts."""

    name: ClassVar = HeadWorker.name


def spans_of(step: StepContext, work: HeadWork, result: StepResult) -> list[Span]:
    """Return what a head must read: rows whose tokens stay, and that are followed by a token."""
    plan = step.plan
    drafts = {draft.index: draft.parents for draft in plan.drafts}
    starts, slots, ids = plan.starts.tolist(), plan.slots.tolist(), plan.input_ids
    stops, others, tokens = plan.stops.tolist(), result.others, result.tokens
    found: list[Span] = []
    row = 0
    for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        parents = drafts.get(index, ())
        count = known = stop - start - len(parents)
        path: Sequence[int] = ()
        output = others.get(index) or SliceOutput((tokens[index],))
        depth, last = work.depths[index], work.following[index]
        if output.token_ids and not output.error:
            right = output.num_accepted
            draft_ids = ids[row + known : row + stop - start].tolist()
            path = path_of(parents, draft_ids, output.token_ids[:right])
            count, last = count + right, output.token_ids[min(right, len(output.token_ids) - 1)]
            depth = depth if len(output.token_ids) == right + 1 and not output.ended else 0
        else:
            depth = 0
        if last < 0:
            count -= 1
        if count > 0:
            rows = np.array([*range(known), *(known + node for node in path)], np.int32) + row
            rows = rows[:count]
            if last >= 0:
                after = np.append(ids[rows[1:]], last).astype(np.int32)
            else:
                after = ids[rows + 1].astype(np.int32)
            found.append(Span(index, slots[index], start, rows, after, depth, known > 1))
        row += stop - start
    return found
