"""One guarded output: what is settled, where it rolls back to, and which tokens are banned."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.review import Review
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarMatcher
from sylvan.runtime.features.grammar.guard.regions import TagWatch
from sylvan.runtime.features.grammar.guard.tokens import TokenKinds
from sylvan.runtime.features.grammar.guard.watch import JsonWatch, Violation
from sylvan.runtime.features.grammar.thinking import ThoughtTracker
from sylvan.runtime.features.grammar.vocabulary import Vocabulary

MAX_TRIES = 256
"""Most rollbacks of one output."""
MAX_HELD = 4096
"""Tokens withheld from the client; beyond that, the first ones can no longer be rolled back."""
_TRIES_EACH = 3  # retries of a value before more of the text around it is regenerated


@dataclass(frozen=True, slots=True)
class GuardedGrammar:
    """A grammar that enforces part of its schema, and the guard for the rest.

    Attributes:
        grammar: Grammar of the relaxed schema.
        watch: Makes a watch that checks an output against the full schema.
        kinds: Token classes of the model.
    """

    grammar: CompiledGrammar
    watch: Callable[[], JsonWatch | TagWatch]
    kinds: TokenKinds

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""
        return self.kinds.vocabulary


class OutputGuard:
    """Guards one output.

    A violation bans the token that caused it. If that was tried or leaves no choice, it bans the
    token that started the value, then the tokens that started the containers around it. Bans are
    dropped with the text before them, so this is a depth-first search. It depends only on the
    output.

    Args:
        guarded: The grammar.
        request: The request.
    """

    def __init__(self, guarded: GuardedGrammar, request: GenerateRequest) -> None:
        self._guarded, self._request = guarded, request
        self._ends = frozenset((*request.eos_ids, *request.sampling.stop_token_ids))
        self._first = len(request.input_ids)
        self._tokens: list[int] = []  # tokens of the output
        self._floor = self._first
        self._banned_at: dict[int, set[int]] = {}  # by position
        self._tries = Counter[int]()  # by the first byte that was regenerated
        self._total = 0
        self.banned_next: tuple[int, ...] = ()
        """IDs that must not come next."""
        self._reset()
        for token in request.output_ids.tolist():
            self._follow(token, check=False)
        self._release_checked()

    def review(self, tokens: Sequence[int], *, complete: bool) -> Review:
        """Check the next tokens.

        Raises:
            RequestError: No output was found that satisfies the schema.
        """
        for token in tokens:
            if (violation := self._follow(token)) is not None:
                return self._roll_back(violation)
        if complete and (violation := self._watch.end()) is not None:
            return self._roll_back(violation)
        self._release_checked()
        return Review(self._first + len(self._tokens), self._floor)

    # ---- forward

    def _reset(self) -> None:
        """Forget all tokens."""
        request, tokens = self._request, self._guarded.vocabulary.tokens
        thinking = request.thinking
        self._tracker = ThoughtTracker(thinking, tokens) if thinking is not None else None
        self._tokens = []
        self._begin_answer(b"")

    def _begin_answer(self, text: bytes) -> None:
        """Start the answer after the tokens so far, or with `text` inside the last of them."""
        self._watch = self._guarded.watch()
        self._lead = text
        self._answer = len(self._tokens)
        self._byte_ends: list[int] = []  # end of each answer token in the text
        self._in_strings: list[bool] = []  # whether it starts inside a string
        if text:
            self._watch.write(text)

    def _follow(self, token: int, *, check: bool = True) -> Violation | None:
        self._tokens.append(token)
        tracker = self._tracker
        if tracker is not None and not tracker.ended:
            thought = tracker.inside
            if tracker.follow(token):
                self._begin_answer(tracker.rest)
                return None
            if thought:
                self._answer = len(self._tokens)
                return None
        text = b"" if token in self._ends else self._guarded.vocabulary.tokens[token]
        self._in_strings.append(self._watch.in_string)
        found = self._watch.write(text, check=check)
        self._byte_ends.append(self._watch.length)
        return found

    def _release_checked(self) -> None:
        """Release the text before the first value that may still violate the schema."""
        length = self._first + len(self._tokens)
        undecided_from = self._watch.undecided_from
        checked = length if undecided_from is None else self._position_of(undecided_from)
        self._floor = max(self._floor, min(checked, length), length - MAX_HELD)
        if undecided_from is None:
            self._tries.clear()
        self._banned_at = {at: ids for at, ids in self._banned_at.items() if at >= self._floor}
        self._ban_next()

    def _position_of(self, offset: int) -> int:
        """Return the position of the token that contains this byte of the text."""
        return self._first + self._answer + bisect_right(self._byte_ends, offset)

    # ---- back

    def _roll_back(self, violation: Violation) -> Review:
        self._total += 1
        if self._total > MAX_TRIES:
            raise self._failure(violation, f"after {MAX_TRIES} tries")
        last = self._first + len(self._tokens) - 1
        position = self._last_alternative(self._wanted(violation, last), violation)
        if position is None:
            position = self._last_alternative(last, violation)
        if position is None:
            raise self._failure(violation, "nothing else can be written")
        self._banned_at.setdefault(position, set()).update(
            self._equivalent_tokens(position, violation)
        )
        self._banned_at = {at: ids for at, ids in self._banned_at.items() if at <= position}
        kept = self._tokens[: position - self._first]
        self._reset()
        for token in kept:
            self._follow(token, check=False)
        self._ban_next()
        return Review(position, self._floor)

    def _wanted(self, violation: Violation, last: int) -> int:
        """Return the position from which to regenerate, if possible."""
        for target in (violation.at, *violation.starts):
            if self._tries[target] < _TRIES_EACH:
                break
        else:
            target = violation.starts[-1]
        self._tries[target] += 1
        for later in [at for at in self._tries if at > target]:
            del self._tries[later]
        position = last if target == violation.at else self._position_of(target)
        return max(self._floor, min(last, position))

    def _equivalent_tokens(self, position: int, violation: Violation) -> frozenset[int]:
        """Return the token at a position, and those that write the same JSON."""
        index = position - self._first
        token, kinds, place = self._tokens[index], self._guarded.kinds, index - self._answer
        if token in self._ends or place >= len(self._in_strings) or self._in_strings[place]:
            return frozenset({token})
        begin = self._byte_ends[place - 1] if place else 0
        brought_it = violation.at == begin + kinds.blanks_before(token)
        return kinds.blank | (kinds.equivalent_closers(token) if brought_it else {token})

    def _last_alternative(self, position: int, violation: Violation) -> int | None:
        """Return the last position up to there where another token is possible, or None."""
        matcher = self._matcher(position)
        row = np.zeros(self._guarded.vocabulary.words, np.int32)
        while position >= self._floor:
            gone = self._banned_at.get(position, set()) | self._equivalent_tokens(
                position, violation
            )
            if self._allowed(matcher, row) - gone:
                return position
            if position - self._first <= self._answer:
                return None
            matcher.rollback(1)
            position -= 1
        return None

    def _matcher(self, position: int) -> GrammarMatcher:
        """Return the matcher before the token at a position."""
        matcher = self._guarded.grammar.matcher()
        if self._lead:
            matcher.accept_all(self._guarded.vocabulary.encode(self._lead))
        matcher.accept_all(self._tokens[self._answer : position - self._first])
        return matcher

    def _allowed(self, matcher: GrammarMatcher, row: np.ndarray) -> set[int]:
        size = self._guarded.vocabulary.size
        if not matcher.fill_mask(row):
            row[:] = -1
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
        allowed = set(np.flatnonzero(bits).tolist()) - {*self._guarded.vocabulary.eos_ids}
        return allowed | self._ends if matcher.is_accepting() else allowed

    def _ban_next(self) -> None:
        position = self._first + len(self._tokens)
        ids = self._banned_at.get(position)
        self.banned_next = tuple(sorted(ids)) if ids else ()

    def _failure(self, violation: Violation, why: str) -> RequestError:
        message = f"{violation.name}: no valid value was found ({why}): {violation.reason}"
        return RequestError(message, param=violation.name.partition(":")[0])
