"""Helpers shared by provider backends: messages, on-demand SDK imports, token usage."""

from __future__ import annotations

import importlib
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

from sylvan.lang.context import StateContext
from sylvan.lang.errors import MissingExtraError
from sylvan.lang.sampling import GenParams


def load_sdk(module: str, extra: str, package: str | None = None) -> Any:
    """Import a provider's SDK.

    Raises:
        MissingExtraError: it is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package or module, extra) from error


def chat_messages(s: StateContext) -> list[dict[str, Any]]:
    """The messages so far; a state without roles is one user message."""
    return list(s.messages_) or [{"role": "user", "content": s.text_}]


def split_system(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The system prompt, and the messages after it."""
    if messages and messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return "", messages


def warn_unsupported(params: GenParams, provider: str, *names: str) -> None:
    """Warn about parameters of the program that a provider does not support."""
    lost = [name for name in names if params.values.get(name) is not None]
    if lost:
        warnings.warn(f"{provider} does not support {', '.join(lost)}; ignored", stacklevel=2)


@dataclass(slots=True)
class TokenUsage:
    """Tokens that a service counted, over all calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count one call; safe from many threads."""
        with self._lock:
            self.prompt_tokens += prompt_tokens
            self.completion_tokens += completion_tokens

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self.prompt_tokens = self.completion_tokens = 0
