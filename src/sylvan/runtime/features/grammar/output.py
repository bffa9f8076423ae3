"""One output on its way through its grammar and its thinking."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.thinking import ThoughtTracker

ANY, SOME = -2, -1
"""See `Output.choice`."""


@dataclass(slots=True)
class Output:
    """Where an output is.

    Attributes:
        matcher: The grammar's; None if only thinking is followed. It has moved past `due`.
        position: Of the next token to be given out; steps in flight that sample an earlier one
            are void.
        limit: Of positions: no token is given out there.
        ends: Ids that end the output, where the grammar accepts.
        thinking: Until it is over, no grammar constrains; None: there is none.
        jumps: Tokens that are certain are given out without a forward pass.
        due: Tokens that are certain and not given out yet.
        over: Nothing can follow, `due` apart.
        error: Why the output cannot go on.
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

    @property
    def thinks(self) -> bool:
        """Whether no grammar constrains yet."""
        return self.thinking is not None and not self.thinking.over

    @property
    def choice(self) -> int:
        """What may come next: one id only, known without a mask; SOME of the ids; or ANY."""
        if self.error:
            return ANY
        thinking = self.thinking
        if thinking is not None and not thinking.over:
            return thinking.due[0] if thinking.due else ANY
        if self.due:
            return ANY if self.jumps else self.due[0]
        return ANY if self.matcher is None or self.over else SOME

    @property
    def may_end(self) -> bool:
        """Whether one of `ends` may come next."""
        if self.thinks or self.due or self.matcher is None:
            return False
        return self.matcher.is_accepting()

    def follow(self, token: int) -> bool:
        """Take in a token that was decided; whether that is news to the grammar."""
        self.position += 1
        if self.thinking is not None and not self.thinking.over:
            self.thinking.follow(token)
            return True
        matcher = self.matcher
        if matcher is None:
            return False
        if self.due:
            if token == self.due[0]:
                self.due = self.due[1:]
                return False
            matcher.rollback(len(self.due))
            self.due = ()
        if not matcher.accept(token):
            self.error = matcher.error() or f"the grammar does not allow token {token}"
        return True
