"""Guesses what followed the same tokens the last time, in the prompt or in the output.

Where what the model mostly says is known (`contexts`), the surer of both is the guess.

There is no index to build or evict: the newest token is looked for among all tokens of the
request, and the places are narrowed to those with the same tokens before it. In numpy that is a
pass over int32 numbers: 12 us beside 1,024 tokens, 52 us beside 131,072. A suffix automaton would
have to take in each token of each prompt, guesses wanted or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.api import GRADES, NOTHING, Proposal, share_grade
from sylvan.runtime.features.speculation.contexts import ContextTree
from sylvan.runtime.features.speculation.corpus import END, Corpus, GivenCorpora, TenantCorpora

_FEW = 4  # places are compared one by one
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
        """See `Drafter.propose`; the grade is the length of the match."""
        ids = req.tokens.view(0, req.tokens.length)
        end, matched = longest_match(ids, self._longest)
        shortest = self._shortest if self._contexts is None else 1
        found = continuation(ids, end, most) if matched >= shortest else ()
        for corpus in self._corpora(req):
            place, length = match_in(corpus.ids, ids, self._longest)
            if length > matched and length >= self._shortest:
                there = until_end(corpus.ids[place + 1 : place + 1 + most])
                found, matched = (there, length) if there else (found, matched)
        if self._contexts is not None:
            return self._mixed(self._contexts, ids, found, matched, most)
        return Proposal(found, min(matched, GRADES - 1)) if found else NOTHING

    def forget(self, req: Req) -> None:
        """See `Drafter.forget`."""
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
                if token == copied[at] or COPY_SHARES[min(matched + at, _FEW)] > share:
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


def longest_match(ids: IntArray, longest: int) -> tuple[int, int]:
    """Where most of the newest tokens came before: the index of the last of them, and how many.

    At most `longest` are compared; of equal places it is the last. (-1, 0) if the newest token is
    new.
    """
    newest = len(ids) - 1
    places = np.flatnonzero(ids[:newest] == ids[newest]) if newest > 0 else np.empty(0, np.int64)
    if not len(places):
        return -1, 0
    matched = 1
    while len(places) > _FEW and matched < longest:
        places_left = places[np.searchsorted(places, matched) :]
        places_left = places_left[ids[places_left - matched] == ids[newest - matched]]
        if not len(places_left):
            return int(places[-1]), matched
        places = places_left
        matched += 1
    if len(places) > _FEW:
        return int(places[-1]), matched
    end = ids[max(0, len(ids) - longest) :].tolist()[::-1]
    found = [(_common(ids, place, end), place) for place in places.tolist()]
    matched, place = max(found)
    return place, matched


def match_in(corpus: IntArray, ids: IntArray, longest: int) -> tuple[int, int]:
    """Where in `corpus` most of the newest tokens of `ids` are: as `longest_match`."""
    end = ids[max(0, len(ids) - longest) :].tolist()[::-1]
    places = np.flatnonzero(corpus == end[0]) if end else np.empty(0, np.int64)
    matched = 0
    best = -1
    while len(places) and matched < len(end):
        best, matched = int(places[-1]), matched + 1
        if matched == len(end):
            break
        places = places[np.searchsorted(places, matched) :]
        places = places[corpus[places - matched] == end[matched]]
    return best, matched


def until_end(ids: IntArray) -> tuple[int, ...]:
    """The tokens up to the end of their text."""
    found = ids.tolist()
    return tuple(found[: found.index(END)] if END in found else found)


def _common(ids: IntArray, place: int, end: list[int]) -> int:
    """How many tokens up to `place` are those of `end`, which is in reverse order."""
    before = ids[max(0, place + 1 - len(end)) : place + 1].tolist()[::-1]
    pairs = zip(before, end, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), len(before))


def continuation(ids: IntArray, end: int, count: int) -> tuple[int, ...]:
    """The `count` tokens that came after index `end`; where these run out they repeat."""
    found = ids[end + 1 : end + 1 + count].tolist()
    repeated = len(ids) - 1 - end
    while len(found) < count:
        found.append(found[-repeated])
    return tuple(found)
