"""The state of one output: in its grammar, and in its thinking."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.thinking import ThoughtTracker

ANY, SOME, FEW, MORE = -2, -1, -3, -4
"""See `Output.choice`."""


@dataclass(slots=True)
class Output:
    """The state of one output.

    While it may still start thinking (`undecided`), both the tracker and the grammar follow its
    tokens: if they turn out to be a marker, the grammar is reset.

    Attributes:
        matcher: The grammar's matcher; None if only thinking is tracked. It is past `due`.
        position: Position of the next emitted token; steps in flight that sample an earlier one
            are void.
        limit: Position at which no token is emitted any more.
        ends: IDs that end the output, if the grammar accepts.
        thinking: Tracker; during thinking no grammar applies; None: no thinking.
        jumps: Whether forced tokens are emitted without a forward pass.
        due: Forced tokens, if this is the answer, that were not emitted yet.
        over: Nothing can follow, except `due`.
        error: Why the output cannot continue.
        taken: Number of emitted tokens that `matcher` has accepted.
        refused: The grammar rejects the text so far: it must become a marker.
        banned_at: Position at which some IDs are banned.
        banned: The banned IDs.
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
    banned_at: int = -1
    banned: tuple[int, ...] = ()

    @property
    def thinks(self) -> bool:
        """Whether the grammar does not apply yet."""
        return self.thinking is not None and self.thinking.inside

    @property
    def undecided(self) -> bool:
        """Whether the next tokens may be a marker, part of one, or the answer."""
        thinking = self.thinking
        return thinking is not None and self.matcher is not None and thinking.undecided

    @property
    def choice(self) -> int:
        """The allowed next tokens.

        A single ID, known without a mask; SOME: what the grammar allows, and `extra_ids`; FEW:
        `extra_ids` alone; MORE: all except `ends`, because an answer must follow; or ANY.
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
    def extra_ids(self) -> tuple[int, ...]:
        """IDs that may come next regardless of the grammar."""
        if not self.undecided or self.thinking is None:
            return ()
        return (*self.due[:1], *self.thinking.openings)

    @property
    def is_decided(self) -> bool:
        """Whether the result of the next step is known, whatever is sampled."""
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
        """Apply a sampled token; return whether the grammar had not accepted it yet."""
        self.position += 1
        thinking = self.thinking
        if thinking is None or thinking.over:
            return self._accept(token)
        thought = thinking.inside
        if thinking.follow(token):
            self._restart()
            return True
        return thought or self._accept(token)

    def ban(self, position: int, token_ids: tuple[int, ...]) -> None:
        """Bar these IDs at that position, though the grammar allows them."""
        self.banned_at, self.banned = position, token_ids
        if self.position == position and self.due and self.due[0] in token_ids:
            self._take_back(0)  # the same text in other tokens leads elsewhere

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
        """Reset to before the answer."""
        if self.matcher is not None and not self.error:
            self._take_back(self.taken)
            self.refused = False

    def _take_back(self, taken: int) -> None:
        """Roll back `due`, and that many tokens before it."""
        assert self.matcher is not None
        self.matcher.rollback(len(self.due) + taken)
        self.taken -= taken
        self.due, self.over = (), False
