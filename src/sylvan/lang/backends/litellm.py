"""Many providers, through LiteLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sylvan.lang.backends._messages import chat_messages, load_sdk, warn_unsupported
from sylvan.lang.backends.api import BaseBackend, StreamItem
from sylvan.lang.chat_templates import MessageFormat, get_chat_template_by_model_path
from sylvan.lang.context import StateContext
from sylvan.lang.sampling import GenParams

_UNSUPPORTED = ("regex", "json_schema", "ebnf", "dtype", "top_k", "min_p", "stop_regex")


class LiteLLM(BaseBackend):
    """A model by LiteLLM's name for it, such as `openai/gpt-4o`.

    Args:
        model_name: Provider and model.
        chat_template: How roles are spelt in the program's text.
        client_params: For `litellm.completion`: `api_key`, `base_url`, `timeout`, `max_retries`,
            `default_headers`, `organization`.

    Raises:
        MissingExtraError: the package is not installed.
    """

    is_chat_model = True

    def __init__(
        self, model_name: str, chat_template: MessageFormat | None = None, **client_params: Any
    ) -> None:
        super().__init__()
        self._sdk = load_sdk("litellm", "litellm")
        self.model_name = model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        self.client_params = {"timeout": 600, **client_params}

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StateContext, sampling_params: GenParams) -> tuple[Any, Any]:
        answer = self._sdk.completion(**self._options(s, sampling_params))
        s.scope.check()
        texts = [choice.message.content or "" for choice in answer.choices]
        metas = [{"finish_reason": choice.finish_reason} for choice in answer.choices]
        return (texts, metas) if len(texts) > 1 else (texts[0], metas[0])

    def generate_stream(self, s: StateContext, sampling_params: GenParams) -> Iterator[StreamItem]:
        for chunk in self._sdk.completion(stream=True, **self._options(s, sampling_params)):
            for choice in chunk.choices:
                yield choice.delta.content or "", {}, choice.index

    def _options(self, s: StateContext, params: GenParams) -> dict[str, Any]:
        warn_unsupported(params, "LiteLLM", *_UNSUPPORTED)
        sampling = params.to_protocol()
        return {
            **self.client_params,
            "model": self.model_name,
            "messages": chat_messages(s),
            "max_tokens": sampling.max_new_tokens,
            "n": sampling.n if sampling.n > 1 else None,
            "stop": list(sampling.stop) or None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
        }
