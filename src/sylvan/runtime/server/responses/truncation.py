"""`truncation: auto`: drops the oldest turns of a conversation that is too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sylvan.protocol.errors import ContextLengthError
from sylvan.runtime.serving.conversation import Conversation, render
from sylvan.runtime.serving.service import GenerationService

Message = Mapping[str, Any]


async def fitted(service: GenerationService, conversation: Conversation) -> Conversation:
    """Return the conversation with as many of its latest turns as fit beside the answer.

    System messages and the last turn always stay: if they alone are too long, the request fails as
    it would without truncation.
    """
    wanted = conversation.sampling.max_new_tokens or 1
    room = service.manager.facts.max_request_tokens - wanted
    choices = [conversation, *_shortened(conversation)]
    low, high = 0, len(choices) - 1
    while low < high:  # the first that fits; each is shorter than the ones before
        middle = (low + high) // 2
        if await _length(service, choices[middle]) <= room:
            high = middle
        else:
            low = middle + 1
    return choices[low]


async def _length(service: GenerationService, conversation: Conversation) -> float:
    try:
        return len((await render(service, conversation)).input_ids)
    except ContextLengthError:  # too long to render at all
        return float("inf")


def _shortened(conversation: Conversation) -> list[Conversation]:
    messages = conversation.messages
    kept = [message for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    return [replace(conversation, messages=[*kept, *rest[at:]]) for at in _turns(rest)]


def _turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices where turns start, except the first: at each user message."""
    return [i for i, message in enumerate(messages) if i and message["role"] == "user"]
