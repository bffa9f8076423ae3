"""Grows draft trees with a draft head: each level expands the most likely nodes.

Each expanded node is a sequence of its own for the head: its KV for the drafts before it is in
spare pages, copied from its parent's.

Shapes: R requests, F expanded nodes, D hidden, W draftable tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.memory import copy_tokens
from sylvan.runtime.features.speculation.head_work import TreeShape
from sylvan.runtime.features.speculation.trees import DraftNode, likeliest, ranked

Pass = Callable[[torch.Tensor, IntArray, IntArray, IntArray], tuple[torch.Tensor, torch.Tensor]]
"""Runs the head on vectors (F, D) with IDs, page table rows and positions (F,): logits (F, W)
and vectors (F, D)."""
Drawn = Callable[[torch.Tensor, IntArray, IntArray], tuple[torch.Tensor, IntArray]]
"""Expands the head's logits to all tokens, and samples, for slots and positions."""


@dataclass(slots=True)
class _Growing:
    """The growing tree of one request.

    Attributes:
        slot: Slot of the request.
        base: Position of its first draft.
        depth: Largest depth.
        nodes: Nodes so far.
        front: Nodes to expand.
        rows: Page table row of each node expanded at the last depth.
        vectors: Row of each among the vectors of that pass.
    """

    slot: int
    base: int
    depth: int
    nodes: list[DraftNode]
    front: list[int]
    rows: dict[int, int]
    vectors: dict[int, int]

    def add(self, parent: int, choices: Sequence[tuple[int, float]]) -> None:
        """Add candidate children of `parent`."""
        score = self.nodes[parent].score if parent >= 0 else 0.0
        self.front += range(len(self.nodes), len(self.nodes) + len(choices))
        self.nodes += [DraftNode(token, parent, score + log) for token, log in choices]

    def narrow(self, width: int) -> None:
        """Keep only the best nodes for expansion."""
        self.front = sorted(self.front, key=lambda node: -self.nodes[node].score)[:width]


class TreeDrafter:
    """Drafts trees for a few requests at once.

    Args:
        batch: The head's batch; its page table has `2 * limit * shape.width` rows after those of
            requests.
        first_page: First spare page; each of those rows has `pages`.
        pages: Spare pages per row.
        shape: Shape of the trees.
        limit: Most requests.
    """

    def __init__(
        self, batch: ForwardBatch, first_page: int, pages: int, shape: TreeShape, limit: int
    ) -> None:
        self.limit = limit
        self._batch, self._first_page, self._pages = batch, first_page, pages
        self._shape, self._half = shape, limit * shape.width

    def grow(
        self,
        asking: Sequence[tuple[int, int, int]],
        first: tuple[torch.Tensor, torch.Tensor],
        run_head: Pass,
        draw: Drawn,
    ) -> list[tuple[list[int], list[int]]]:
        """Return tokens and parents of each request's drafts.

        Args:
            asking: Slot, position of the first draft, and depth of each request (R,).
            first: Logits and vectors after the known tokens: (R, W), (R, D).
            run_head: Runs the head.
            draw: Samples as the model does.
        """
        trees = [_Growing(*ask, [], [], {}, {}) for ask in asking]
        logits_FW, hidden_FD = first
        grown = [(tree, -1) for tree in trees]
        level = 0
        while grown:
            slots = np.array([tree.slot for tree, _ in grown], np.int32)
            positions = np.array([tree.base + level + 1 for tree, _ in grown], np.int32)
            every = likeliest(*draw(logits_FW, slots, positions), self._shape.width)
            for tree in trees:
                tree.front = []
            for (tree, parent), choices in zip(grown, every, strict=True):
                tree.add(parent, choices)
            level += 1
            sources: list[int] = []
            going: list[tuple[_Growing, int]] = []
            for at, tree in enumerate(trees):
                if tree.depth <= level:
                    continue
                tree.narrow(self._shape.width)
                going += [(tree, node) for node in tree.front]
                parents = [tree.nodes[node].parent for node in tree.front]
                sources += [tree.vectors[p] if p >= 0 else at for p in parents]
            if not going:
                break
            rows = self._assign_pages(going, level)
            ids = np.array([tree.nodes[node].token for tree, node in going], np.int32)
            at = np.array([tree.base + level - 1 for tree, _ in going], np.int32)
            logits_FW, hidden_FD = run_head(hidden_FD[torch.tensor(sources)], ids, rows, at)
            for number, (tree, node) in enumerate(going):
                tree.vectors[node] = number
            grown = going
        return [ranked(tree.nodes, self._shape.nodes) for tree in trees]

    def _assign_pages(self, going: Sequence[tuple[_Growing, int]], level: int) -> IntArray:
        """Assign pages to the expanded nodes, and copy their parents' KV."""
        table_SP, size = self._batch.host.page_tables[0], self._batch.kv.page_size
        offset = level % 2 * self._half
        copies: list[tuple[int, int, int, int]] = []
        rows = np.arange(offset, offset + len(going), dtype=np.int32)
        rows += self._batch.limits.max_reqs
        for number, (tree, node) in enumerate(going):
            row, at = int(rows[number]), tree.base + level - 1
            before = tree.rows.get(tree.nodes[node].parent, tree.slot)
            low, high = tree.base // size, at // size + 1
            page = self._first_page + (offset + number) * self._pages
            table_SP[row] = table_SP[tree.slot]
            table_SP[row, low:high] = range(page, page + high - low)
            for place in range(low, high):
                count = min(size, at - place * size)
                if count > 0:
                    source, target = int(table_SP[before, place]), int(table_SP[row, place])
                    copies.append((source, target, count, 0))
            tree.rows[node] = row
        copy_tokens(self._batch.kv.groups, copies)
        return rows
