"""System prompts whose cached prefix all tenants share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.text.chat_template import ChatRequest, ChatTemplate

_ENDINGS = ("1", "x")  # characters that no tokenizer merges with the text before


def shared_starts(
    files: Sequence[str], template: ChatTemplate, variables: Mapping[str, Any]
) -> list[IntArray]:
    """Return the token IDs that start every conversation with each of these system prompts.

    Raises:
        ConfigError: A file is unreadable, or the template rejects system messages.
    """
    return [_start(file, template, variables) for file in files]


def _start(file: str, template: ChatTemplate, variables: Mapping[str, Any]) -> IntArray:
    field = "text.shared_system_prompts"
    try:
        text = Path(file).read_text("utf-8").rstrip("\n")
        one, other = (
            np.array(template.render(_conversation(text, end, variables)).input_ids, np.int32)
            for end in _ENDINGS
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: {file} cannot be read as text: {error}") from error
    except RequestError as error:
        raise ConfigError(f"{field}: the chat template refuses {file}: {error}") from error
    count = min(len(one), len(other))
    return one[: int((one[:count] != other[:count]).argmax())]


def _conversation(system: str, user: str, variables: Mapping[str, Any]) -> ChatRequest:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return ChatRequest(messages=messages, kwargs=dict(variables))
