"""`sglext`: extra fields of OpenAI answers, requested by fields or headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.openai.common import GenerationBody
from sylvan.protocol.messages import Usage
from sylvan.runtime.server.endpoint import Call

_INPUT_HEADER = "x-sglext-return-input-ids"
_OUTPUT_HEADER = "x-sglext-return-output-ids"


class ResponseExtras:
    """Collects the requested extras; adds nothing if none were requested.

    Attributes:
        wants_input: The prompt's token IDs were requested.
    """

    def __init__(self, call: Call[Any]) -> None:
        body: GenerationBody = call.body
        headers = call.request.headers
        self._cached = bool(body.return_cached_tokens_details)
        self.wants_input = headers.get(_INPUT_HEADER) == "1" or bool(
            getattr(body, "return_input_ids_in_sglext", None)
        )
        self._output = headers.get(_OUTPUT_HEADER) == "1" or bool(
            getattr(body, "return_output_ids_in_sglext", None)
        )
        self._cached_tokens = self._loaded_tokens = self._host_tokens = 0
        self._input_ids: list[int] = []
        self._output_ids: dict[int, list[int]] = {}

    def add_prompt(self, ids: Sequence[int]) -> None:
        """Record the prompt."""
        if self.wants_input:
            self._input_ids.extend(ids)

    def add(self, index: int, ids: Sequence[int], usage: Usage) -> None:
        """Record the output of one choice."""
        if self._cached:
            self._cached_tokens = max(self._cached_tokens, usage.cached_tokens)
            self._loaded_tokens = max(self._loaded_tokens, usage.loaded_tokens)
            self._host_tokens = max(self._host_tokens, usage.host_tokens)
        if self._output:
            self._output_ids.setdefault(index, []).extend(ids)

    def reply(self) -> dict[str, Any]:
        """Return `{"sglext": ...}`, or an empty object."""
        found: dict[str, Any] = {}
        if self._cached:
            found["cached_tokens_details"] = {
                "device": self._cached_tokens - self._loaded_tokens - self._host_tokens,
                "host": self._host_tokens,
            }
            if self._loaded_tokens:
                found["cached_tokens_details"]["storage"] = self._loaded_tokens
        if self.wants_input:
            found["input_ids"] = self._input_ids
        if self._output:
            found["output_ids"] = [self._output_ids[i] for i in sorted(self._output_ids)]
        return {"sglext": found} if found else {}
