"""Drafts what followed the same tokens last time, in the prompt or the output.

If the model's usual continuations are known (`contexts`), the more confident of the two is used.

There is no index to build or evict: `kernels.ngram` finds what a suffix automaton would in one pass
over the tokens, sixteen at once. An automaton would have to process each token of each prompt,
whether or not drafts are wanted, and takes a hundred bytes per token.
"""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.kernels.ngram import longest_match
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.api import GRADES, NOTHING, Proposal, share_grade
from sylvan.runtime.features.speculation.contexts import ContextTree
from sylvan.runtime.features.speculation.corpus import END, Corpus, GivenCorpora, TenantCorpora

COPY_SHARES = (0.0, 0.3, 0.55, 0.7, 0.8)
"""Probability that a copy continues after this many matching tokens: if the context tree is more
confident, it drafts. Measured with the built-in model on chat prompts."""


class NgramDrafter:
    """Implements `Drafter`: repeats what followed the longest match, the newest of equal ones.

    Args:
        shortest: Fewest matching tokens.
        longest: Most tokens that are compared.
        shared: Keeps texts of finished requests for the tenant's other requests; None: a request
            is drafted from its own text only.
        given: Corpora for all requests.
        contexts: Tree of the model's usual continuations; None: unknown.
    """

    def __init__(
        self,
        shortest: int,
        longest: int,
        shared: TenantCorpora | None = None,
        given: GivenCorpora | None = None,
        contexts: ContextTree | None = None,
    ) -> None:
        assert 0 < shortest <= longest
        self._shortest, self._longest = shortest, longest
        self._shared, self._given, self._contexts = shared, given, contexts

    def propose(self, req: Req, limit: int) -> Proposal:
        """Draft; the grade is the length of the match."""
        ids = req.tokens.view(0, req.tokens.length)
        end, matched = longest_match(ids[:-1], ids, self._longest)
        shortest = self._shortest if self._contexts is None else 1
        found = continuation(ids, end, limit) if matched >= shortest else ()
        for corpus in self._corpora(req):
            place, length = longest_match(corpus.ids, ids, self._longest)
            if length > matched and length >= self._shortest:
                there = until_end(corpus.ids[place + 1 : place + 1 + limit])
                found, matched = (there, length) if there else (found, matched)
        if self._contexts is not None:
            return self._mixed(self._contexts, ids, found, matched, limit)
        return Proposal(found, min(matched, GRADES - 1)) if found else NOTHING

    def forget(self, req: Req) -> None:
        if self._shared is not None:
            self._shared.add(req)

    def _mixed(
        self, contexts: ContextTree, ids: IntArray, copied: Sequence[int], matched: int, limit: int
    ) -> Proposal:
        """Choose the more confident draft per token; a copy ends where another draft differs."""
        text: list[int] = ids[-max(1, contexts.depth) :].tolist()
        tokens: list[int] = []
        grades: list[int] = []
        for at in range(limit):
            token, share = contexts.predict(text)
            grade = share_grade(share)
            if at < len(copied):
                if (
                    token == copied[at]
                    or COPY_SHARES[min(matched + at, len(COPY_SHARES) - 1)] > share
                ):
                    token, grade = copied[at], min(matched + at, GRADES - 1)
                else:
                    copied = ()
            tokens.append(token)
            grades.append(grade)
            text.append(token)
        return Proposal(tuple(tokens), grades=tuple(grades))

    def _corpora(self, req: Req) -> list[Corpus]:
        shared = self._shared.find(req) if self._shared is not None else None
        found = [shared] if shared is not None else []
        return [*found, *(self._given.every if self._given is not None else ())]


def until_end(ids: IntArray) -> tuple[int, ...]:
    """Return the tokens up to the end of their text."""
    found = ids.tolist()
    return tuple(found[: found.index(END)] if END in found else found)


def continuation(ids: IntArray, end: int, count: int) -> tuple[int, ...]:
    """Return the `count` tokens after index `end`; repeat them if they run out."""
    found = ids[end + 1 : end + 1 + count].tolist()
    repeated = len(ids) - 1 - end
    while len(found) < count:
        found.append(found[-repeated])
    return tuple(found)
