"""The state of one output: in its grammar, and in its thinking."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.thinking import ThoughtTracker

UNCONSTRAINED, BY_GRAMMAR, EXTRA_ONLY, ANY_BUT_END = -2, -1, -3, -4
"""Values of `Output.choice` that are not a token ID."""


@dataclass(slots=True)
class Output:
    """The state of one output.

    While it may still start thinking (`undecided`), both the tracker and the grammar follow its
    tokens: if they turn out to be a marker, the grammar is reset.

    Attributes:
        matcher: The grammar's matcher, which has already accepted `forced_ids`; None if only
            thinking is tracked.
        position: Position of the next emitted token; steps in flight that sample an earlier one
            are void.
        limit: Position from which on no token is emitted.
        end_ids: IDs that end the output, if the grammar accepts.
        thinking: Tracker; during thinking no grammar applies; None: no thinking.
        jumps: Whether forced tokens are emitted without a forward pass.
        forced_ids: Tokens that the grammar forces next in the answer, not emitted yet.
        finished: The output ends after `forced_ids`.
        error: Why the output cannot continue.
        num_accepted: Number of emitted tokens that `matcher` has accepted.
        rejected: The grammar rejects the text so far, so it can only become a marker.
        banned_at: Position at which some IDs are banned.
        banned: The banned IDs.
    """

    matcher: GrammarMatcher | None
    position: int
    limit: int
    end_ids: tuple[int, ...]
    thinking: ThoughtTracker | None = None
    jumps: bool = False
    forced_ids: tuple[int, ...] = ()
    finished: bool = False
    error: str = ""
    num_accepted: int = 0
    rejected: bool = False
    banned_at: int = -1
    banned: tuple[int, ...] = ()

    @property
    def is_thinking(self) -> bool:
        """Whether the grammar does not apply yet."""
        return self.thinking is not None and self.thinking.inside

    @property
    def undecided(self) -> bool:
        """Whether the next tokens may be a marker, part of one, or the answer."""
        thinking = self.thinking
        return thinking is not None and self.matcher is not None and thinking.undecided

    @property
    def choice(self) -> int:
        """The allowed next tokens: a single ID, known without a mask, or one of these values.

        BY_GRAMMAR: what the grammar allows, and `extra_ids`. EXTRA_ONLY: `extra_ids` alone.
        ANY_BUT_END: all except `end_ids`, because an answer must follow. UNCONSTRAINED: all.
        """
        if self.error:
            return UNCONSTRAINED
        thinking = self.thinking
        if thinking is not None and thinking.inside:
            free = UNCONSTRAINED if self.matcher is None or not self.end_ids else ANY_BUT_END
            return thinking.forced_ids[0] if thinking.forced_ids else free
        if self.undecided and (self.forced_ids or self.rejected):
            return EXTRA_ONLY
        if self.forced_ids:
            return UNCONSTRAINED if self.jumps else self.forced_ids[0]
        return UNCONSTRAINED if self.matcher is None or self.finished else BY_GRAMMAR

    @property
    def extra_ids(self) -> tuple[int, ...]:
        """IDs that may come next regardless of the grammar."""
        if not self.undecided or self.thinking is None:
            return ()
        return (*self.forced_ids[:1], *self.thinking.openings)

    @property
    def is_decided(self) -> bool:
        """Whether the result of the next step is known, whatever is sampled."""
        if not self.forced_ids:
            return self.finished
        return self.jumps and not self.undecided

    @property
    def may_end(self) -> bool:
        """Whether one of `end_ids` may come next."""
        if self.is_thinking or self.forced_ids or self.rejected or self.matcher is None:
            return False
        return self.matcher.is_accepting()

    def follow(self, token: int) -> bool:
        """Apply a sampled token; return whether the grammar had not accepted it yet."""
        self.position += 1
        thinking = self.thinking
        if thinking is None or thinking.ended:
            return self._accept(token)
        thought = thinking.inside
        if thinking.follow(token):
            self._restart()
            return True
        return thought or self._accept(token)

    def ban(self, position: int, token_ids: tuple[int, ...]) -> None:
        """Ban these IDs at that position, although the grammar allows them."""
        self.banned_at, self.banned = position, token_ids
        if self.position == position and self.forced_ids and self.forced_ids[0] in token_ids:
            self._roll_back(0)  # other tokens for the same text may continue differently

    def _accept(self, token: int) -> bool:
        matcher = self.matcher
        if matcher is None:
            return False
        if self.forced_ids:
            if token == self.forced_ids[0]:
                self.forced_ids = self.forced_ids[1:]
                self.num_accepted += 1
                return False
            self._roll_back(0)
        if not self.rejected and matcher.accept(token):
            self.num_accepted += 1
        elif self.undecided:
            self.rejected = True
        else:
            self.error = matcher.error() or f"the grammar does not allow token {token}"
        return True

    def _restart(self) -> None:
        """Reset to before the answer."""
        if self.matcher is not None and not self.error:
            self._roll_back(self.num_accepted)
            self.rejected = False

    def _roll_back(self, num_accepted: int) -> None:
        """Roll back `forced_ids`, and this many accepted tokens before them."""
        assert self.matcher is not None
        self.matcher.rollback(len(self.forced_ids) + num_accepted)
        self.num_accepted -= num_accepted
        self.forced_ids, self.finished = (), False
