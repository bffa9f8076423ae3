"""`logprobs` of completion choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.logprobs import CompletionLogprobs, CompletionToken
from sylvan.protocol.messages import TokenLogprobs
from sylvan.text.spans import TextSpan
from sylvan.text.visible_tokens import VisibleTokens


class CompletionTokenLog:
    """Log probabilities of the tokens of one choice: of the echoed prompt, and of its text.

    `visible` is None if the client also gets all IDs: then each ID has an entry.
    """

    def __init__(
        self, maker: CompletionLogprobs, visible: VisibleTokens[CompletionToken] | None
    ) -> None:
        self._maker = maker
        self._visible = visible
        self._ready: list[CompletionToken] = []
        self._length = 0

    def add_prompt(self, part: TokenLogprobs | None) -> None:
        """Add those of the prompt."""
        self._ready += [] if part is None else self._maker.tokens(part)

    def reply(
        self, ids: Sequence[int], parts: Sequence[TokenLogprobs], text: str
    ) -> dict[str, Any]:
        """Return the entries due after more output."""
        tokens = [token for part in parts for token in self._maker.tokens(part)]
        if self._visible is not None:
            start, self._length = self._length, self._length + len(text)
            self._visible.add(ids, tokens, text)
            tokens = self._visible.take([TextSpan(start, self._length)])
        ready, self._ready = [*self._ready, *tokens], []
        return self._maker.reply(ready)
