"""One output on its way through its grammar and its thinking."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.thinking import ThoughtTracker


@dataclass(slots=True)
class Output:
    """Where an output is.

    Attributes:
        matcher: The grammar's; None if only thinking is followed. It has moved past `due`.
        position: Of the next token to be given out; steps in flight that sample an earlier one
            are void.
        ends: Ids that end the output, where the grammar accepts.
        thinking: Until it is over, no grammar constrains; None: there is none.
        jumps: Tokens that are certain are given out without a forward pass.
        due: Tokens that are certain and not given out yet.
        over: Nothing can follow, `due` apart.
        error: Why the output cannot go on.
    """

    matcher: GrammarMatcher | None
    position: int
    ends: tuple[int, ...]
    thinking: ThoughtTracker | None = None
    jumps: bool = False
    due: tuple[int, ...] = ()
    over: bool = False
    error: str = ""

    @property
    def thinks(self) -> bool:
        """Whether no grammar constrains yet."""
        return self.thinking is not None and not self.thinking.over

    @property
    def forced_id(self) -> int | None:
        """The only id that may come next, where that is known without a mask."""
        due = self.due
        if self.thinking is not None and not self.thinking.over:
            due = self.thinking.due
        return due[0] if due else None

    @property
    def is_masked(self) -> bool:
        """Whether the next token is chosen among some ids only."""
        if self.error:
            return False
        if self.thinks:
            return self.forced_id is not None
        if self.due:
            return not self.jumps
        return self.matcher is not None and not self.over

    @property
    def may_end(self) -> bool:
        """Whether one of `ends` may come next."""
        if self.thinks or self.due or self.matcher is None:
            return False
        return self.matcher.is_accepting()

    def is_at_end(self) -> bool:
        """Whether the grammar leaves nothing after `due`."""
        return not self.thinks and self.matcher is not None and self.matcher.is_terminated()

    def follow(self, token: int) -> None:
        """Take in a token that was decided."""
        self.position += 1
        if self.thinking is not None and not self.thinking.over:
            self.thinking.follow(token)
            return
        matcher = self.matcher
        if matcher is None:
            return
        if self.due:
            if token == self.due[0]:
                self.due = self.due[1:]
                return
            matcher.rollback(len(self.due))
            self.due = ()
        if not matcher.accept(token):
            self.error = matcher.error() or f"the grammar does not allow token {token}"
