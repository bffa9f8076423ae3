"""Reads the prompts that a model is to answer."""

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


def read_prompts(file: Path, tokenizer: Tokenizer, most: int) -> list[IntArray]:
    """Token ids of the prompts in a JSONL file, or of the lines of any other text file, as asked.

    Lines of a text file are messages of a user where the model has a chat template. Empty lines
    are passed over.

    Args:
        file: The file.
        tokenizer: Of the model.
        most: Prompts; further ones are left out.

    Raises:
        ConfigError: the file cannot be read, or a line is not a prompt; names the line.
    """
    chat = ChatTemplate(tokenizer)
    found: list[IntArray] = []
    for number, line in _lines(file):
        if len(found) == most:
            break
        try:
            ids = _encoded(_parsed(line) if file.suffix == ".jsonl" else line, tokenizer, chat)
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


def _parsed(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise TypeError(f"{line:.40} is not an object")
    return found


def _encoded(prompt: dict[str, Any] | str, tokenizer: Tokenizer, chat: ChatTemplate) -> list[int]:
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
