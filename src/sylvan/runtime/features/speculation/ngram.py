"""Guesses what followed the same tokens the last time, in the prompt or in the output.

Where what the model mostly says is known (`contexts`), the surer of both is the guess.

There is no index to build or evict: `kernels.ngram` finds what a suffix automaton would by a pass
over the tokens, sixteen at once. An automaton would have to take in each token of each prompt,
guesses wanted or not, and holds a hundred bytes for each.
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
"""How often a copy goes on after so many tokens that match: where the tree of contexts is surer, it
guesses. Over what the built-in model is asked in chats."""


class NgramDrafter:
    """Implements `Drafter`: repeats what came after the longest match, the newest of equals.

    Args:
        shortest: Tokens that have to match.
        longest: Tokens that are compared at most.
        shared: Keeps texts of requests that have ended, for others of the tenant; None: a request
            is guessed from its own text only.
        given: Texts for all.
        contexts: What the model mostly says; None: nothing is known of that.
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

    def propose(self, req: Req, most: int) -> Proposal:
        """The grade is the length of the match."""
        ids = req.tokens.view(0, req.tokens.length)
        end, matched = longest_match(ids[:-1], ids, self._longest)
        shortest = self._shortest if self._contexts is None else 1
        found = continuation(ids, end, most) if matched >= shortest else ()
        for corpus in self._corpora(req):
            place, length = longest_match(corpus.ids, ids, self._longest)
            if length > matched and length >= self._shortest:
                there = until_end(corpus.ids[place + 1 : place + 1 + most])
                found, matched = (there, length) if there else (found, matched)
        if self._contexts is not None:
            return self._mixed(self._contexts, ids, found, matched, most)
        return Proposal(found, min(matched, GRADES - 1)) if found else NOTHING

    def forget(self, req: Req) -> None:
        if self._shared is not None:
            self._shared.add(req)

    def _mixed(
        self, contexts: ContextTree, ids: IntArray, copied: Sequence[int], matched: int, most: int
    ) -> Proposal:
        """Each guess by the surer of the two, a copy as long as no other guess broke it."""
        text: list[int] = ids[-max(1, contexts.depth) :].tolist()
        tokens: list[int] = []
        grades: list[int] = []
        for at in range(most):
            token, share = contexts.guess(text)
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
    """The tokens up to the end of their text."""
    found = ids.tolist()
    return tuple(found[: found.index(END)] if END in found else found)


def continuation(ids: IntArray, end: int, count: int) -> tuple[int, ...]:
    """The `count` tokens that came after index `end`; where these run out they repeat."""
    found = ids[end + 1 : end + 1 + count].tolist()
    repeated = len(ids) - 1 - end
    while len(found) < count:
        found.append(found[-repeated])
    return tuple(found)
