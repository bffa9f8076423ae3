"""Google's Vertex AI, through the `google-genai` SDK."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from sylvan.config.env import variable
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

_UNSUPPORTED = ("regex", "ebnf", "dtype", "min_p", "stop_regex", "stop_token_ids")


class VertexAI(BaseBackend):
    """A Gemini model.

    Args:
        model_name: The model.
        safety_settings: Passed on to the service.
        project: Google Cloud project; if not given, the environment's GCP_PROJECT_ID, or what
            the SDK finds.
        location: Region; by default from GCP_LOCATION.
        client: A `google.genai.Client` to use instead of making one.

    Raises:
        MissingExtraError: the SDK is not installed.
    """

    is_chat_model = True

    def __init__(
        self,
        model_name: str,
        safety_settings: Any = None,
        *,
        project: str | None = None,
        location: str | None = None,
        client: Any = None,
    ) -> None:
        super().__init__()
        sdk = load_sdk("google.genai", "vertexai", "google-genai")
        self.model_name = model_name
        self.chat_template = get_chat_template("default")
        self.token_usage = TokenUsage()
        self.client = client or sdk.Client(
            vertexai=True,
            project=project or variable("GCP_PROJECT_ID"),
            location=location or variable("GCP_LOCATION"),
        )
        self._safety_settings = safety_settings
        self._types = load_sdk("google.genai.types", "vertexai")
        self._api_error: type[Exception] = load_sdk("google.genai.errors", "vertexai").APIError

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StateContext, sampling_params: GenParams) -> tuple[Any, Any]:
        try:
            answer = self.client.models.generate_content(**self._options(s, sampling_params))
        except self._api_error as error:
            raise _translated(error) from error
        s.scope.check()
        self._count(answer)
        texts = [_text(candidate) for candidate in answer.candidates or ()]
        if not texts:
            raise BackendError(f"{self.model_name} gave no answer: {answer.prompt_feedback}")
        return (texts, [{} for _ in texts]) if len(texts) > 1 else (texts[0], {})

    def generate_stream(self, s: StateContext, sampling_params: GenParams) -> Iterator[StreamItem]:
        chunk = None
        try:
            for chunk in self.client.models.generate_content_stream(
                **self._options(s, sampling_params)
            ):
                for index, candidate in enumerate(chunk.candidates or ()):
                    yield _text(candidate), {}, candidate.index or index
        except self._api_error as error:
            raise _translated(error) from error
        if chunk is not None:
            self._count(chunk)

    def _count(self, answer: Any) -> None:
        usage = answer.usage_metadata
        if usage is not None:
            prompt, written = usage.prompt_token_count, usage.candidates_token_count
            self.token_usage.add(prompt or 0, written or 0)

    def _options(self, s: StateContext, params: GenParams) -> dict[str, Any]:
        warn_unsupported(params, "Vertex AI", *_UNSUPPORTED)
        sampling = params.to_protocol()
        system, messages = split_system(chat_messages(s))
        config: dict[str, Any] = {
            "candidate_count": sampling.n,
            "max_output_tokens": sampling.max_new_tokens,
            "stop_sequences": list(sampling.stop),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else None,
            "system_instruction": system or None,
            "safety_settings": self._safety_settings,
        }
        if (remaining := s.scope.remaining_s()) is not None:
            config["http_options"] = {"timeout": int(remaining * 1000)}
        contents = [self._content(message) for message in messages]
        return {"model": self.model_name, "contents": contents, "config": config}

    def _content(self, message: dict[str, Any]) -> Any:
        """A message in the OpenAI format as one in Google's."""
        role = "model" if message["role"] == "assistant" else "user"
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return self._types.Content(role=role, parts=[self._part(part) for part in parts])

    def _part(self, part: dict[str, Any]) -> Any:
        if part["type"] == "text":
            return self._types.Part(text=part["text"])
        url: str = part["image_url"]["url"]
        if not url.startswith("data:"):
            return self._types.Part.from_uri(file_uri=url, mime_type="image/jpeg")
        data = base64.b64decode(url.partition(",")[2])
        return self._types.Part.from_bytes(data=data, mime_type="image/jpeg")


def _text(candidate: Any) -> str:
    parts = candidate.content.parts if candidate.content is not None else None
    return "".join(part.text or "" for part in parts or ())


def _translated(error: Exception) -> BackendError:
    return BackendError(str(error), status=getattr(error, "code", None))
