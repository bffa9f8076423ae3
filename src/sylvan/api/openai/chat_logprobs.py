"""`logprobs` of chat choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.logprobs import chat_content
from sylvan.protocol.messages import TokenLogprobs
from sylvan.text.spans import TextSpan
from sylvan.text.tokenizer import Tokenizer
from sylvan.text.visible_tokens import VisibleTokens


class ChatLogprobs:
    """Log probabilities of one choice, for the tokens of its reasoning and its text.

    Args:
        tokenizer: Decodes tokens.
        skip_special_tokens: Whether the text of the sample omits special tokens.
        every: Return one entry per output ID instead, for clients that also get the IDs.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, every: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._visible = None
        if not every:
            self._visible = VisibleTokens[dict[str, Any]](
                tokenizer, skip_special_tokens=skip_special_tokens
            )

    def reply(
        self,
        ids: Sequence[int],
        parts: Sequence[TokenLogprobs],
        text: str,
        spans: Sequence[TextSpan],
    ) -> dict[str, Any]:
        """Return the entries due after more output.

        Args:
            ids: New tokens.
            parts: Their log probabilities.
            text: New text.
            spans: Where the reasoning and text parsed from it are.
        """
        entries = [entry for part in parts for entry in chat_content(part, self._bytes_of)]
        if self._visible is not None:
            self._visible.add(ids if entries else (), entries, text)
            entries = self._visible.take(spans)
        return {"content": entries}
