"""One output on its way through its grammar and its thinking."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.thinking import ThoughtTracker

ANY, SOME, FEW, MORE = -2, -1, -3, -4
"""See `Output.choice`."""


@dataclass(slots=True)
class Output:
    """Where an output is.

    While it may still open its thinking (`undecided`), what it writes is followed by the tracker
    and by the grammar: if it turns out to be a marker, the grammar goes back to its start.

    Attributes:
        matcher: The grammar's; None if only thinking is followed. It has moved past `due`.
        position: Of the next token to be given out; steps in flight that sample an earlier one
            are void.
        limit: Of positions: no token is given out there.
        ends: Ids that end the output, where the grammar accepts.
        thinking: While the output thinks, no grammar constrains; None: there is none.
        jumps: Tokens that are certain are given out without a forward pass.
        due: Tokens that are certain, should this be the answer, and not given out yet.
        over: Nothing can follow, `due` apart.
        error: Why the output cannot go on.
        taken: How many tokens given out `matcher` is past.
        refused: The grammar does not allow what was written: it has to become a marker.
        barred_at: A position at which some ids must not come.
        barred: These ids.
    """

    matcher: GrammarMatcher | None
    position: int
    limit: int
    ends: tuple[int, ...]
    thinking: ThoughtTracker | None = None
    jumps: bool = False
    due: tuple[int, ...] = ()
    over: bool = False
    error: str = ""
    taken: int = 0
    refused: bool = False
    barred_at: int = -1
    barred: tuple[int, ...] = ()

    @property
    def thinks(self) -> bool:
        """Whether no grammar constrains yet."""
        return self.thinking is not None and self.thinking.inside

    @property
    def undecided(self) -> bool:
        """Whether what comes next may be a marker, or part of it, or the answer."""
        thinking = self.thinking
        return thinking is not None and self.matcher is not None and thinking.undecided

    @property
    def choice(self) -> int:
        """What may come next.

        One id only, known without a mask; SOME: what the grammar allows, and `besides`; FEW:
        `besides` alone; MORE: all but `ends`, since an answer has to come; or ANY.
        """
        if self.error:
            return ANY
        thinking = self.thinking
        if thinking is not None and thinking.inside:
            free = ANY if self.matcher is None or not self.ends else MORE
            return thinking.due[0] if thinking.due else free
        if self.undecided and (self.due or self.refused):
            return FEW
        if self.due:
            return ANY if self.jumps else self.due[0]
        return ANY if self.matcher is None or self.over else SOME

    @property
    def besides(self) -> tuple[int, ...]:
        """Ids that may come next without asking the grammar."""
        if not self.undecided or self.thinking is None:
            return ()
        return (*self.due[:1], *self.thinking.openings)

    @property
    def is_settled(self) -> bool:
        """Whether what the next step brings is known, whatever is sampled."""
        if not self.due:
            return self.over
        return self.jumps and not self.undecided

    @property
    def may_end(self) -> bool:
        """Whether one of `ends` may come next."""
        if self.thinks or self.due or self.refused or self.matcher is None:
            return False
        return self.matcher.is_accepting()

    def follow(self, token: int) -> bool:
        """Take in a token that was decided; whether that is news to the grammar."""
        self.position += 1
        thinking = self.thinking
        if thinking is None or thinking.over:
            return self._accept(token)
        thought = thinking.inside
        if thinking.follow(token):
            self._restart()
            return True
        return thought or self._accept(token)

    def bar(self, position: int, token_ids: tuple[int, ...]) -> None:
        """Let none of these ids come there, though the grammar allows them."""
        self.barred_at, self.barred = position, token_ids
        if self.position == position and self.due and self.due[0] in token_ids:
            self._take_back(0)  # written in other tokens, the same text leads elsewhere

    def _accept(self, token: int) -> bool:
        matcher = self.matcher
        if matcher is None:
            return False
        if self.due:
            if token == self.due[0]:
                self.due = self.due[1:]
                self.taken += 1
                return False
            self._take_back(0)
        if not self.refused and matcher.accept(token):
            self.taken += 1
        elif self.undecided:
            self.refused = True
        else:
            self.error = matcher.error() or f"the grammar does not allow token {token}"
        return True

    def _restart(self) -> None:
        """The answer has not begun."""
        if self.matcher is not None and not self.error:
            self._take_back(self.taken)
            self.refused = False

    def _take_back(self, taken: int) -> None:
        """`due`, and so many tokens before it."""
        assert self.matcher is not None
        self.matcher.rollback(len(self.due) + taken)
        self.taken -= taken
        self.due, self.over = (), False
