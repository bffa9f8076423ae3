"""Training data of a worker: endless batches, independent of interruptions."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.train.data import mix
from tools.train.tokenizer import encode_example

Row = tuple[list[int], list[int]]
Batch = tuple[torch.Tensor, torch.Tensor]

WIDTHS = (28, 32, 36, 40, 48, 56, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640)
LOOKAHEAD = 8


def recitation(tokenizer: Tokenizer, rng: random.Random, width: int = 112) -> Row:
    """Return random tokens to copy or to reverse, as ids.

    They can be predicted only by looking back, so a model that starts with them forms its induction
    heads within minutes (Olsson et al., "In-context Learning and Induction Heads", 2022).
    """
    ids: list[int] = []
    learnt: list[bool] = []
    words = range(300, tokenizer.get_vocab_size() - 8)
    while len(ids) < width // 2:
        items = [rng.choice(words) for _ in range(rng.randint(3, 16))]
        if rng.random() < 0.2:  # some of them more than once
            items = [rng.choice(items[: max(2, len(items) // 2)]) for _ in items]
        back = rng.random() < 0.3
        asked = tokenizer.encode("Reverse: " if back else "Copy: ", add_special_tokens=False).ids
        end = tokenizer.encode("\n", add_special_tokens=False).ids
        said = [*(items[::-1] if back else items), *end]
        ids += [*asked, *items, *end, *said]
        learnt += [False] * (len(asked) + len(items) + len(end)) + [True] * len(said)
    targets = [i if learn else -100 for i, learn in zip(ids[1:], learnt[1:], strict=True)]
    return ids[:-1][:width], targets[:width]


def padded(rows: list[Row], width: int) -> Batch:
    """Return tokens and targets of rows as one pair of tensors."""
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), -100)
    for index, (ids, wanted) in enumerate(rows):
        tokens[index, : len(ids)] = torch.tensor(ids)
        targets[index, : len(wanted)] = torch.tensor(wanted)
    return tokens, targets


class Batches:
    """Batches of one worker, a fixed number per step.

    The rows of a batch have similar lengths, from a short list of widths: a new shape costs the
    matrix library a compilation, and the allocator a search. Steps are drawn ahead in groups, and
    each gets narrow and wide batches, so that workers that wait for each other take equally long.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        weights: Mapping[str, float],
        *,
        seed: int,
        rank: int,
        batch_tokens: int,
        step_batches: int,
    ) -> None:
        self._tokenizer, self._weights = tokenizer, weights
        self._batch_tokens, self._step_batches = batch_tokens, step_batches
        self._rng = random.Random(f"{seed}:{rank}")
        self._order = random.Random(f"{seed}:order")  # alike in all workers
        self._waiting: dict[int, list[Row]] = {width: [] for width in WIDTHS}
        self._ready: deque[list[Batch]] = deque()

    def next_step(self, recite_share: float) -> list[Batch]:
        """Return the batches of the next step; `recite_share` of new rows are recitation."""
        if not self._ready:
            self._draw_ahead(recite_share)
        return self._ready.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that determines the following batches."""
        return {
            "rng": self._rng.getstate(),
            "order": self._order.getstate(),
            "waiting": self._waiting,
            "ready": list(self._ready),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        self._rng.setstate(state["rng"])
        self._order.setstate(state["order"])
        self._waiting = state["waiting"]
        self._ready = deque(state["ready"])

    def _draw_ahead(self, recite_share: float) -> None:
        drawn = [self._batch(recite_share) for _ in range(LOOKAHEAD * self._step_batches)]
        drawn.sort(key=lambda batch: batch[0].shape[1])
        steps: list[list[Batch]] = [[] for _ in range(LOOKAHEAD)]
        for turn in range(self._step_batches):
            dealt = drawn[turn * LOOKAHEAD : (turn + 1) * LOOKAHEAD]
            for step, batch in zip(steps if turn % 2 == 0 else steps[::-1], dealt, strict=True):
                step.append(batch)
        self._order.shuffle(steps)
        self._ready.extend(steps)

    def _batch(self, recite_share: float) -> Batch:
        while True:
            row = self._row(recite_share)
            length = len(row[0])
            if length > WIDTHS[-1]:
                continue
            width = next(width for width in WIDTHS if width >= length)
            rows = self._waiting[width]
            rows.append(row)
            if len(rows) == self._batch_tokens // width:
                batch = padded(rows, width)
                rows.clear()
                return batch

    def _row(self, recite_share: float) -> Row:
        if self._rng.random() < recite_share:
            return recitation(self._tokenizer, self._rng)
        names = list(self._weights)
        name = self._rng.choices(names, [self._weights[one] for one in names])[0]
        return encode_example(self._tokenizer, mix.draw(name, self._rng, "train"))
