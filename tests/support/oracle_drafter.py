"""A drafter that knows the answers, and is right with a given probability."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from sylvan.runtime.core.req import Draft, Req
from sylvan.runtime.sched.capability import Capability

Prompt = tuple[int, ...]


class OracleDrafter(Capability):
    """Drafts along known answers.

    Args:
        answers: Prompt -> tokens of plain decoding; other prompts get no drafts.
        vocab: Wrong drafts are random ids below this.
        right: Probability that a draft token is right.
        tree: Whether wrong drafts are siblings of right ones, in random order.
        count: Number of tokens drafted ahead.
        seed: Seed of its errors.
    """

    def __init__(
        self,
        answers: Mapping[Prompt, Sequence[int]],
        vocab: int,
        *,
        right: float = 1.0,
        tree: bool = False,
        count: int = 4,
        seed: int = 1,
    ) -> None:
        self._answers, self._vocab = answers, vocab
        self._right, self._tree, self._count = right, tree, count
        self._rng = random.Random(seed)
        self.drafted = 0

    def draft(self, req: Req, limit: int) -> Draft | None:
        """See `Capability.draft`."""
        answer = self._answers.get(tuple(req.request.input_ids.tolist()), ())
        coming = answer[req.num_outputs : req.num_outputs + self._count]
        shape: Callable[[Sequence[int]], Draft] = self._as_tree if self._tree else self._as_chain
        draft = shape(coming[: limit // 2 if self._tree else limit])
        self.drafted += len(draft.tokens)
        return draft if draft.tokens else None

    def _as_chain(self, coming: Sequence[int]) -> Draft:
        tokens = tuple(self._maybe(token) for token in coming)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)))

    def _as_tree(self, coming: Sequence[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        trunk = -1
        for token in coming:
            level = [self._maybe(token), self._rng.randrange(self._vocab)]
            self._rng.shuffle(level)
            tokens += level
            parents += [trunk, trunk]
            trunk = len(tokens) - 2 + (level.index(token) if token in level else 0)
        return Draft(tuple(tokens), tuple(parents))

    def _maybe(self, token: int) -> int:
        return token if self._rng.random() < self._right else self._rng.randrange(self._vocab)
