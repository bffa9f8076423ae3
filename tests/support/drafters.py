"""Drafters that are right, wrong, half right, return nonsense or fail."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.api import NOTHING, Proposal
from tests.support.kv import VOCAB, alone

KINDS = ("right", "half", "wrong", "tree", "nonsense", "raising", "moody")


class ScriptedDrafter:
    """Implements `Drafter`.

    Args:
        kind: One of `KINDS`; "moody" switches between the others.
        seed: Seed of its drafts.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self._kind = kind
        self._rng = random.Random(seed)
        self.following: set[Req] = set()

    def propose(self, req: Req, limit: int) -> Proposal:
        """See `Drafter.propose`."""
        self.following.add(req)
        kind = self._rng.choice(KINDS[:-1]) if self._kind == "moody" else self._kind
        if kind == "raising":
            raise ValueError("the drafter is broken")
        if kind == "nonsense":
            return self._nonsense(limit)
        if kind == "tree":
            return self._tree(alone(req.request)[req.num_outputs :], limit)
        share = {"right": 1.0, "half": 0.5, "wrong": 0.0}[kind]
        coming = alone(req.request)[req.num_outputs :][: self._rng.randint(0, limit)]
        return Proposal(tuple(self._maybe(token, share) for token in coming), limit % 5)

    def forget(self, req: Req) -> None:
        """See `Drafter.forget`."""
        self.following.discard(req)

    def _maybe(self, token: int, share: float) -> int:
        if self._rng.random() < share:
            return token
        return (token + self._rng.randrange(1, VOCAB)) % VOCAB

    def _tree(self, coming: Any, limit: int) -> Proposal:
        """Return a tree of any shape, with right drafts somewhere in it, if it has any."""
        tokens: list[int] = []
        parents: list[int] = []
        right = {-1: 0}  # draft token -> how much of what comes leads to it
        for node in range(self._rng.randint(0, limit)):
            parent = self._rng.choice([-1, *range(node)])
            depth = right.get(parent)
            token = self._rng.randrange(VOCAB)
            if depth is not None and depth < len(coming) and self._rng.random() < 0.6:
                token = coming[depth]
            taken = any(p == parent and t == token for p, t in zip(parents, tokens, strict=True))
            if depth is not None and depth < len(coming) and token == coming[depth] and not taken:
                right[node] = depth + 1
            tokens.append(token)
            parents.append(parent)
        return Proposal(tuple(tokens), 0, tuple(parents))

    def _nonsense(self, limit: int) -> Any:
        return self._rng.choice(
            [
                Proposal((VOCAB,)),
                Proposal((-1, 3)),
                Proposal((2**40,)),
                Proposal((1,) * (limit + 1)),
                Proposal((1,), -3),
                Proposal((1, 2), 0, (-1,)),
                Proposal((1, 2), 0, (1, 0)),
                Proposal((1, 2), 0, (-2, 0)),
                Proposal(("a",)),
                None,
                NOTHING,
            ]
        )


class ScriptedModel:
    """Implements `BatchDrafter` with a `ScriptedDrafter`."""

    def __init__(self, kind: str, seed: int) -> None:
        self._drafter = ScriptedDrafter(kind, seed)

    def write(self, counts: Mapping[Req, int]) -> dict[Req, Any]:
        """See `BatchDrafter.write`."""
        found = {req: self._drafter.propose(req, count) for req, count in counts.items()}
        return {req: proposal.tokens for req, proposal in found.items()}
