"""Log probabilities in the formats of the native and the OpenAI routes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.protocol.messages import TokenLogprobs

TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes]
Entry = list[Any]  # [logprob or null, token id, text or null]
LEAST = -9999.0
"""OpenAI's log probability of impossible tokens: JSON has no infinity."""


def token_entries(part: TokenLogprobs, text_of: TokenText | None) -> list[Entry]:
    """Return `[[logprob, id, text], ...]`: null for the first prompt token and unwanted texts."""
    ids = part.token_ids.tolist()
    return [
        [_number(logprob), token, text_of(token) if text_of else None]
        for logprob, token in zip(part.logprobs.tolist(), ids, strict=True)
    ]


def top_entries(part: TokenLogprobs, text_of: TokenText | None) -> list[list[Entry] | None]:
    """Return the alternatives of every position, most likely first; null where there are none."""
    if part.top_ids is None or part.top_logprobs is None:
        return [None] * len(part.token_ids)
    return [
        None
        if not ids or ids[0] < 0
        else [
            [_number(logprob), token, text_of(token) if text_of else None]
            for logprob, token in zip(logprobs, ids, strict=True)
        ]
        for ids, logprobs in zip(part.top_ids.tolist(), part.top_logprobs.tolist(), strict=True)
    ]


def chosen_entries(
    part: TokenLogprobs, wanted: Sequence[int], text_of: TokenText | None
) -> list[list[Entry] | None]:
    """Return the log probabilities of the requested IDs, at every position."""
    if part.chosen_logprobs is None:
        return [None] * len(part.token_ids)
    return [
        None
        if row and math.isnan(row[0])
        else [
            [_number(logprob), token, text_of(token) if text_of else None]
            for logprob, token in zip(row, wanted, strict=True)
        ]
        for row in part.chosen_logprobs.tolist()
    ]


def chat_content(part: TokenLogprobs, bytes_of: TokenBytes) -> list[dict[str, Any]]:
    """Return the `logprobs.content` of a chat choice."""
    entries = token_entries(part, None)
    tops = top_entries(part, None)[: len(entries)]  # may exceed the requested number
    content: list[dict[str, Any]] = []
    for (logprob, token, _), top in zip(entries, tops, strict=True):
        alternatives = [_chat_token(alt, lp, bytes_of) for lp, alt, _ in top or ()]
        entry = _chat_token(token, logprob, bytes_of)
        content.append({**entry, "top_logprobs": alternatives})
    return content


def _chat_token(token: int, logprob: float, bytes_of: TokenBytes) -> dict[str, Any]:
    data = bytes_of(token)
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}


@dataclass(frozen=True, slots=True)
class CompletionToken:
    """One token of a completion: its text, its log probability, and its alternatives."""

    text: str
    logprob: float | None
    top: dict[str, float] | None


class CompletionLogprobs:
    """`logprobs` of a completion choice; text offsets continue from call to call."""

    def __init__(self, text_of: TokenText, top: int) -> None:
        self._text_of = text_of
        self._top = top
        self._offset = 0

    def tokens(self, part: TokenLogprobs) -> list[CompletionToken]:
        """Convert the tokens of a part."""
        # two IDs may have the same text; the more likely one comes first and stays
        tops = [
            {text: lp for lp, _, text in reversed(top)} if top else None
            for top in top_entries(part, self._text_of)
        ]
        entries = token_entries(part, self._text_of)
        return [
            CompletionToken(text, logprob, top)
            for (logprob, _, text), top in zip(entries, tops[: len(entries)], strict=True)
        ]

    def reply(self, tokens: Sequence[CompletionToken]) -> dict[str, Any]:
        """Return the object for more tokens."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [token.logprob for token in tokens],
            "tokens": [token.text for token in tokens],
            "top_logprobs": [token.top for token in tokens] if self._top else None,
        }


def _number(logprob: float) -> float | None:
    """Return null for a missing probability, else a finite number."""
    return None if math.isnan(logprob) else max(logprob, LEAST)
