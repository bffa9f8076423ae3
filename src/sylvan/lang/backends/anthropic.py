"""Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sylvan.lang.backends._messages import (
    TokenUsage,
    chat_messages,
    load_sdk,
    split_system,
    warn_unsupported,
)
from sylvan.lang.backends.api import BaseBackend, StreamItem
from sylvan.lang.chat_templates import get_chat_template
from sylvan.lang.context import StateContext
from sylvan.lang.errors import BackendError
from sylvan.lang.sampling import GenParams

_UNSUPPORTED = (
    "regex",
    "json_schema",
    "ebnf",
    "dtype",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "stop_regex",
    "stop_token_ids",
)
_SAMPLED = ("temperature", "top_p", "top_k")


class Anthropic(BaseBackend):
    """A Claude model.

    Args:
        model_name: The model.
        args: For the SDK's client.
        kwargs: For the SDK's client, such as `base_url` and `api_key`.

    Raises:
        MissingExtraError: the SDK is not installed.
    """

    is_chat_model = True

    def __init__(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        sdk = load_sdk("anthropic", "anthropic")
        self.model_name = model_name
        self.chat_template = get_chat_template("claude")
        self.client = sdk.Anthropic(*args, **kwargs)
        self.token_usage = TokenUsage()
        self._api_error: type[Exception] = sdk.APIError

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StateContext, sampling_params: GenParams) -> tuple[Any, Any]:
        try:
            answer = self.client.messages.create(**self._options(s, sampling_params))
        except self._api_error as error:
            raise _translated(error) from error
        s.scope.check()
        self.token_usage.add(answer.usage.input_tokens, answer.usage.output_tokens)
        text = "".join(block.text for block in answer.content if block.type == "text")
        return text, {"finish_reason": answer.stop_reason}

    def generate_stream(self, s: StateContext, sampling_params: GenParams) -> Iterator[StreamItem]:
        try:
            with self.client.messages.stream(**self._options(s, sampling_params)) as stream:
                for text in stream.text_stream:
                    yield text, {}
                usage = stream.get_final_message().usage
        except self._api_error as error:
            raise _translated(error) from error
        self.token_usage.add(usage.input_tokens, usage.output_tokens)

    def _options(self, s: StateContext, params: GenParams) -> dict[str, Any]:
        warn_unsupported(params, "Anthropic's API", *_UNSUPPORTED)
        if params.n > 1:
            raise BackendError("Anthropic's API gives one sample per call; fork instead of n")
        sampling = params.to_protocol()
        system, messages = split_system(chat_messages(s))
        options: dict[str, Any] = {
            "model": self.model_name,
            "messages": messages,
            "max_tokens": sampling.max_new_tokens,
            # Newer models refuse these, and newer SDKs have no arguments for them: so only what
            # the program gave, past the SDK.
            "extra_body": {name: params.values[name] for name in _SAMPLED if name in params.values},
        }
        if system:
            options["system"] = system
        if sampling.stop:
            options["stop_sequences"] = list(sampling.stop)
        if (remaining := s.scope.remaining_s()) is not None:
            options["timeout"] = remaining
        return options


def _translated(error: Exception) -> BackendError:
    return BackendError(str(error), status=getattr(error, "status_code", None))
