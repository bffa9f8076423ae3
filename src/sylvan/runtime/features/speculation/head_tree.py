"""Grows trees of guesses with a draft head: at each depth it goes on from the likeliest ones.

Each guess that is gone on from is a text of its own for the head: what it keeps of the guesses
before lies in spare pages, copied from those of the guess before.

Shapes: R requests, F guesses gone on from, D hidden, W tokens that can be guessed.
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
"""Goes on from vectors (F, D) with ids, rows of the page table and positions (F,): logits (F, W)
and vectors (F, D)."""
Drawn = Callable[[torch.Tensor, IntArray, IntArray], tuple[torch.Tensor, IntArray]]
"""Logits of all tokens from those of the head, and what is drawn, for slots and positions."""


@dataclass(slots=True)
class _Growing:
    """The tree of one request.

    Attributes:
        slot: Of the request.
        base: Position at which its first guess is read.
        depth: Of the tree at most.
        nodes: So far.
        front: Nodes to go on from.
        rows: Row of the page table of those gone on from at the last depth, by node.
        vectors: And where their vectors are among those of that pass.
    """

    slot: int
    base: int
    depth: int
    nodes: list[DraftNode]
    front: list[int]
    rows: dict[int, int]
    vectors: dict[int, int]

    def add(self, parent: int, choices: Sequence[tuple[int, float]]) -> None:
        """Guesses that may follow `parent`."""
        score = self.nodes[parent].score if parent >= 0 else 0.0
        self.front += range(len(self.nodes), len(self.nodes) + len(choices))
        self.nodes += [DraftNode(token, parent, score + log) for token, log in choices]

    def narrow(self, width: int) -> None:
        """Go on from the best ones only."""
        self.front = sorted(self.front, key=lambda node: -self.nodes[node].score)[:width]


class TreeGuesser:
    """Guesses trees for a few requests at once.

    Args:
        batch: The head's; its page table has `2 * most * shape.width` rows behind those of
            requests.
        first_page: Of the spare pages, `pages` for each of those rows.
        pages: Spare pages of a row.
        shape: Of the trees.
        most: Requests.
    """

    def __init__(
        self, batch: ForwardBatch, first_page: int, pages: int, shape: TreeShape, most: int
    ) -> None:
        self.most = most
        self._batch, self._first_page, self._pages = batch, first_page, pages
        self._shape, self._half = shape, most * shape.width

    def guess(
        self,
        asking: Sequence[tuple[int, int, int]],
        first: tuple[torch.Tensor, torch.Tensor],
        go_on: Pass,
        draw: Drawn,
    ) -> list[tuple[list[int], list[int]]]:
        """Tokens and parents of the guesses for each request.

        Args:
            asking: Slot, position at which the first guess is read, and depth of each (R,).
            first: Logits and vectors from reading what is known: (R, W), (R, D).
            go_on: Runs the head.
            draw: Draws as the model does.
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
            rows = self._lay_out(going, level)
            ids = np.array([tree.nodes[node].token for tree, node in going], np.int32)
            at = np.array([tree.base + level - 1 for tree, _ in going], np.int32)
            logits_FW, hidden_FD = go_on(hidden_FD[torch.tensor(sources)], ids, rows, at)
            for number, (tree, node) in enumerate(going):
                tree.vectors[node] = number
            grown = going
        return [ranked(tree.nodes, self._shape.nodes) for tree in trees]

    def _lay_out(self, going: Sequence[tuple[_Growing, int]], level: int) -> IntArray:
        """Pages for the guesses that are gone on from, with what the head keeps of those before."""
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
