"""Verifies draft trees with plain causal attention: each path is a separate sequence.

A path uses the request's pages for known tokens and spare pages for drafts, with a copy of the page
at the boundary. So each row attends to its prefix in the order of plain decoding, with the same
bits on any backend. A draft token on several paths is computed once for each.

Shapes: T rows of a plan, G KV groups, P pages of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.memory import copy_tokens
from sylvan.runtime.core.step import DraftRows, StepPlan, ancestors


def pages_of_path(depth: int, page_size: int) -> int:
    """Number of spare pages that a path of `depth` draft tokens needs at any page offset."""
    return 1 + -(-depth // page_size)


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Draft tokens from the root to each leaf, longest path first."""
    inner = set(parents)
    paths = [ancestors(parents, i) for i in range(len(parents)) if i not in inner]
    return sorted(paths, key=len, reverse=True)


def computed_ends(plan: StepPlan) -> dict[int, int]:
    """End of each slice in a step whose trees are laid out as paths."""
    trees = {draft.index: draft for draft in plan.drafts if not draft.is_chain}
    found, before, computed = {0: 0}, 0, 0
    for index, end in enumerate(plan.ends.tolist()):
        if index in trees:
            computed += sum(1 + len(path) for path in leaf_paths(trees[index].parents))
        else:
            computed += end - before
        found[end] = computed
        before = end
    return found


@dataclass(slots=True)
class _Rows:
    """The laid-out step, by row and by sequence."""

    sources: list[int] = field(default_factory=list[int])  # row of the plan
    places: list[int] = field(default_factory=list[int])  # position in the sequence
    tables: list[int] = field(default_factory=list[int])  # page table row, by row
    ends: list[int] = field(default_factory=list[int])  # ends of the sequences
    lens: list[int] = field(default_factory=list[int])
    slots: list[int] = field(default_factory=list[int])

    def add(self, sources: Sequence[int], start: int, table: int) -> range:
        """Append a sequence that computes these rows of the plan; return its row range."""
        first, count = len(self.sources), len(sources)
        self.sources.extend(sources)
        self.places.extend(range(start, start + count))
        self.tables.extend([table] * count)
        self.ends.append(first + count)
        self.lens.append(start + count)
        self.slots.append(table)
        return range(first, first + count)


@dataclass(frozen=True, slots=True)
class _Tree:
    """Layout of a slice's paths."""

    slot: int
    start: int
    paths: Sequence[Sequence[int]]
    tables: Sequence[int]  # page table row of each path


class TreePaths:
    """Lays out a step's draft trees as paths, in the buffers of its batch.

    Args:
        batch: Its page tables have `limits.max_paths` rows after those of requests.
        first_pages: First spare page of each KV group; `pages` for each path.
        pages: See `pages_of_path`.
    """

    def __init__(self, batch: ForwardBatch, first_pages: Sequence[int], pages: int) -> None:
        self._batch, self._first_pages, self._pages = batch, first_pages, pages
        self._trees: dict[int, _Tree] = {}
        self._rows: IntArray | None = None

    def lay_out(self, plan: StepPlan) -> None:
        """Write a plan with trees into the buffers, and copy pages shared by paths."""
        trees = {draft.index: draft for draft in plan.drafts if not draft.is_chain}
        ends, slots, starts = plan.ends.tolist(), plan.slots.tolist(), plan.starts.tolist()
        rows, row_of = _Rows(), np.zeros(plan.num_tokens, np.int32)
        self._trees = {}
        copies: list[tuple[int, int, int, int]] = []
        first = 0
        for index, end in enumerate(ends):
            if index in trees:
                tree = self._place(trees[index], slots[index], starts[index])
                self._trees[index] = tree
                copies += self._shared(tree)
                for path, table in zip(tree.paths, tree.tables, strict=True):
                    own = [first, *(first + 1 + node for node in path)]
                    row_of[own] = rows.add(own, tree.start, table)
            else:
                row_of[first:end] = rows.add(range(first, end), starts[index], slots[index])
            first = end
        copy_tokens(self._batch.kv.groups, copies)
        self._rows = row_of
        self._write(plan, rows, row_of)

    def reset(self) -> None:
        """Reset: the next step has no trees."""
        self._trees, self._rows = {}, None

    def rows(self, rows: IntArray) -> IntArray:
        """Map rows of the plan to rows of the laid-out step."""
        return rows if self._rows is None else self._rows[rows]

    def keep(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Copy the KV of accepted draft tokens into the pages of their requests."""
        copies: list[tuple[int, int, int, int]] = []
        size, tables = self._batch.kv.page_size, self._batch.host.page_tables
        for index, tree in self._trees.items():
            right = list(paths[index])
            which = next(i for i, p in enumerate(tree.paths) if list(p[: len(right)]) == right)
            if not right or not which:
                continue  # the first path is already in place
            stop = tree.start + 1 + len(right)
            for group, table in enumerate(tables):
                for page in range(tree.start // size, (stop - 1) // size + 1):
                    source, target = int(table[tree.tables[which], page]), table[tree.slot, page]
                    copies.append((source, int(target), min(size, stop - page * size), group))
        copy_tokens(self._batch.kv.groups, copies)

    def _place(self, draft: DraftRows, slot: int, start: int) -> _Tree:
        """Assign spare page table rows to all paths but the first, which uses the request's own."""
        paths = leaf_paths(draft.parents)
        limits, host, size = self._batch.limits, self._batch.host, self._batch.kv.page_size
        used = sum(len(tree.paths) - 1 for tree in self._trees.values())
        spare = range(limits.max_reqs + used, limits.max_reqs + used + len(paths) - 1)
        for number, (path, row) in enumerate(zip(paths[1:], spare, strict=True), used):
            low, high = start // size, (start + len(path)) // size + 1
            for table, first in zip(host.page_tables, self._first_pages, strict=True):
                table[row] = table[slot]
                page = first + number * self._pages
                table[row, low:high] = range(page, page + high - low)
        return _Tree(slot, start, paths, [slot, *spare])

    def _shared(self, tree: _Tree) -> list[tuple[int, int, int, int]]:
        """Copies of the known tokens in the page where the draft tokens start."""
        page, count = divmod(tree.start, self._batch.kv.page_size)
        return [
            (int(table[tree.slot, page]), int(table[row, page]), count, group)
            for group, table in enumerate(self._batch.host.page_tables)
            for row in tree.tables[1:]
            if count
        ]

    def _write(self, plan: StepPlan, rows: _Rows, row_of: IntArray) -> None:
        host, batch = self._batch.host, self._batch
        count, texts = len(rows.sources), len(rows.ends)
        host.input_ids[:count] = plan.input_ids[rows.sources]
        places = np.array(rows.places, np.int32)
        host.positions[:count] = self._positions(plan, rows, places)
        host.q_starts[0] = 0
        host.q_starts[1 : texts + 1] = rows.ends
        host.kv_lens[:texts], host.req_slots[:texts] = rows.lens, rows.slots
        host.map_slots(np.array(rows.tables, np.int32), places, batch.kv.page_size)
        assert plan.sample_rows is not None
        host.sample_rows[: plan.num_samples] = row_of[plan.sample_rows]
        types = plan.token_types
        host.token_types[:count] = 0 if types is None else types[rows.sources]
        batch.input_embeds = tuple(
            msgspec.structs.replace(part, row=int(row_of[part.row])) for part in batch.input_embeds
        )
        batch.drafts = ()  # plain sequences
        batch.ready(count, texts, plan.num_samples)

    def _positions(self, plan: StepPlan, rows: _Rows, places: IntArray) -> IntArray:
        """Rotary positions of the rows."""
        given = self._batch.rotary_positions
        given = plan.positions if given is None else given
        if given is not None:
            return given[rows.sources]
        slots = np.repeat(plan.slots, plan.stops - plan.starts)[rows.sources]
        return places + self._batch.host.position_shifts[slots]
