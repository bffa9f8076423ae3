"""OpenAI's chat and completion APIs, and compatible services."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sylvan.lang.backends._messages import TokenUsage, chat_messages, load_sdk, warn_unsupported
from sylvan.lang.backends._token_search import TokenEncoding, integer_bias, search_choice
from sylvan.lang.backends.api import BaseBackend, Meta, StreamItem
from sylvan.lang.chat_templates import MessageFormat, get_chat_template_by_model_path
from sylvan.lang.choices import ChoicesDecision, ChoicesMethod, token_length_normalized
from sylvan.lang.context import StateContext
from sylvan.lang.errors import BackendError
from sylvan.lang.sampling import GenParams, as_list

INSTRUCT_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")
_REASONING_PREFIXES = ("o1", "o3", "o4", "gpt-5")
_UNSUPPORTED = ("regex", "json_schema", "ebnf", "top_k", "min_p", "stop_regex", "stop_token_ids")


class OpenAI(BaseBackend):
    """A model behind the OpenAI API.

    A chat model generates whole messages: a `gen` must follow the opening of an assistant message,
    unless the program uses `num_api_spec_tokens`.

    Args:
        model_name: The model.
        is_chat_model: Whether to use chat completions; by the model's name if not given.
        chat_template: How roles are spelt in the program's text.
        is_azure: Use Azure's client.
        encoding: Tokenizer of the model, for `select` and `dtype=int` of completion models;
            from `tiktoken` if not given.
        args: For the SDK's client.
        kwargs: For the SDK's client, such as `base_url` and `api_key`.

    Raises:
        MissingExtraError: the SDK is not installed.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: MessageFormat | None = None,
        is_azure: bool = False,
        *args: Any,
        encoding: TokenEncoding | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        sdk = load_sdk("openai", "openai")
        self.client = (sdk.AzureOpenAI if is_azure else sdk.OpenAI)(*args, **kwargs)
        self.model_name = model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        self.is_chat_model = (
            model_name not in INSTRUCT_MODELS if is_chat_model is None else is_chat_model
        )
        self.chat_prefix = self.chat_template.role_prefix_and_suffix["assistant"][0]
        self.token_usage = TokenUsage()
        self._encoding = encoding
        self._api_error = sdk.APIError

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StateContext, sampling_params: GenParams) -> tuple[Any, Any]:
        """Meta info has `finish_reason`."""
        dtype = sampling_params.dtype
        if dtype is None:
            return self._ask(s, self._options(sampling_params))
        if self.is_chat_model or dtype not in ("int", "str"):
            kind = "chat" if self.is_chat_model else "completion"
            raise BackendError(f"dtype {dtype} does not work with OpenAI's {kind} models")
        options = self._options(sampling_params)
        if dtype == "int":
            bias = integer_bias(self._tokens())
            return self._ask(s, {**options, "logit_bias": bias, "stop": [" "]})
        texts, meta = self._ask(s, {**options, "stop": '"'}, opening='"')
        quoted = [f'"{text}"' for text in as_list(texts)]
        return (quoted if isinstance(texts, list) else quoted[0]), meta

    def generate_stream(self, s: StateContext, sampling_params: GenParams) -> Iterator[StreamItem]:
        if sampling_params.dtype is not None:
            raise BackendError("dtype does not work with streaming from OpenAI models")
        options = self._options(sampling_params) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._errors_translated():
            for chunk in self._create(s, options, ""):
                if chunk.usage is not None:
                    self.token_usage.add(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
                for choice in chunk.choices:
                    text = choice.delta.content if self.is_chat_model else choice.text
                    yield text or "", {"finish_reason": choice.finish_reason}, choice.index

    def select(
        self,
        s: StateContext,
        choices: Sequence[str],
        temperature: float,
        choices_method: ChoicesMethod = token_length_normalized,
    ) -> ChoicesDecision:
        """Select token by token; ignores `choices_method`."""
        del choices_method
        if self.is_chat_model:
            raise NotImplementedError(
                "select does not work with OpenAI's chat models; use a completion model "
                "such as gpt-3.5-turbo-instruct, or a runtime endpoint"
            )

        def next_token(prompt: list[int], bias: dict[int, int]) -> str:
            answer = self.client.completions.create(
                model=self.model_name,
                prompt=prompt,
                logit_bias=bias,
                max_tokens=1,
                temperature=temperature,
            )
            self._count(answer)
            return answer.choices[0].text

        with self._errors_translated():
            scores = search_choice(self._tokens(), s.text_, choices, next_token)
        best = max(range(len(choices)), key=scores.__getitem__)
        return ChoicesDecision(choices[best], {"scores": scores})

    def _ask(self, s: StateContext, options: dict[str, Any], opening: str = "") -> tuple[Any, Any]:
        with self._errors_translated():
            answer = self._create(s, options, opening)
        self._count(answer)
        s.scope.check()
        texts = [
            (choice.message.content if self.is_chat_model else choice.text) or ""
            for choice in answer.choices
        ]
        metas: list[Meta] = [{"finish_reason": choice.finish_reason} for choice in answer.choices]
        return (texts, metas) if len(texts) > 1 else (texts[0], metas[0])

    def _create(self, s: StateContext, options: dict[str, Any], opening: str) -> Any:
        options = {**options, "model": self.model_name}
        if (remaining := s.scope.remaining_s()) is not None:
            options["timeout"] = remaining
        if not self.is_chat_model:
            return self.client.completions.create(prompt=s.text_ + opening, **options)
        if not s.text_.endswith(self.chat_prefix):
            raise BackendError(
                "For OpenAI chat models, gen must be right after assistant(...) opens, or the "
                "program must speculate: @function(num_api_spec_tokens=128)"
            )
        return self.client.chat.completions.create(messages=chat_messages(s), **options)

    def _options(self, params: GenParams) -> dict[str, Any]:
        warn_unsupported(params, "OpenAI's API", *_UNSUPPORTED)
        sampling = params.to_protocol()
        reasons = self.model_name.startswith(_REASONING_PREFIXES)
        limit = "max_completion_tokens" if reasons and self.is_chat_model else "max_tokens"
        options: dict[str, Any] = {
            limit: sampling.max_new_tokens,
            "n": sampling.n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
        }
        if sampling.stop:
            options["stop"] = list(sampling.stop)
        if sampling.sampling_seed is not None:
            options["seed"] = sampling.sampling_seed
        if sampling.logit_bias:
            options["logit_bias"] = sampling.logit_bias
        return options

    def _count(self, answer: Any) -> None:
        if answer.usage is not None:
            self.token_usage.add(answer.usage.prompt_tokens, answer.usage.completion_tokens)

    def _tokens(self) -> TokenEncoding:
        if self._encoding is None:
            tiktoken = load_sdk("tiktoken", "openai")
            try:
                self._encoding = tiktoken.encoding_for_model(self.model_name)
            except KeyError:
                self._encoding = tiktoken.get_encoding("cl100k_base")
        assert self._encoding is not None
        return self._encoding

    def _errors_translated(self) -> _Translated:
        return _Translated(self._api_error)


class _Translated:
    """Converts the SDK's errors to ours."""

    def __init__(self, api_error: type[Exception]) -> None:
        self._api_error = api_error

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, self._api_error):
            status = getattr(error, "status_code", None)
            raise BackendError(str(error), status=status) from error
