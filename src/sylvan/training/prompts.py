"""Reads a file of training prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.text.chat_template import ChatRequest, ChatTemplate
from sylvan.text.tokenizer import Tokenizer

FORMS = 'a line is {"messages": [...]} with chat messages and perhaps "tools", or {"prompt": "..."}'


def read_prompts(file: Path, tokenizer: Tokenizer, limit: int) -> list[IntArray]:
    """Read and tokenise the prompts in a file.

    Each line of a `.jsonl` file is an object with `messages` or a `prompt`. Each line of any other
    file is a prompt: a user message if the model has a chat template, else plain text. Empty lines
    are skipped.

    Args:
        file: The file.
        tokenizer: The model's tokenizer.
        limit: Maximum number of prompts; the rest of the file is not read.

    Raises:
        ConfigError: The file is unreadable, or a line is not a prompt; the message names the line.
    """
    chat = ChatTemplate(tokenizer)
    found: list[IntArray] = []
    for number, line in _lines(file):
        if len(found) == limit:
            break
        try:
            ids = _encode(_parse(line) if file.suffix == ".jsonl" else line, tokenizer, chat)
        except (ValueError, TypeError, RequestError) as error:
            raise ConfigError(f"{file}, line {number}: {error}; {FORMS}") from None
        found.append(np.array(ids, np.int32))
    if not found:
        raise ConfigError(f"{file} has no prompts")
    return found


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _parse(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise TypeError(f"{line:.40} is not an object")
    return found


def _encode(prompt: dict[str, Any] | str, tokenizer: Tokenizer, chat: ChatTemplate) -> list[int]:
    if isinstance(prompt, str):
        if not chat:
            return tokenizer.encode(prompt)
        return chat.render(ChatRequest(messages=[{"role": "user", "content": prompt}])).input_ids
    text, messages = prompt.get("prompt"), prompt.get("messages")
    if isinstance(text, str) and text:
        return tokenizer.encode(text)
    if not isinstance(messages, list) or not messages:
        raise ValueError("it has neither messages nor a prompt")
    asked = ChatRequest(
        messages=messages, tools=prompt.get("tools"), kwargs=prompt.get("chat_template_kwargs")
    )
    return chat.render(asked).input_ids
