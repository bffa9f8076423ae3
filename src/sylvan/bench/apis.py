"""The request and answer formats of each API under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sylvan.bench.outcome import RequestRecord, TokenTimer
from sylvan.bench.workload import BenchTurn
from sylvan.config.bench import AnswerConfig

History = Sequence[tuple[str, str]]
"""Earlier turns of a conversation: prompt and answer."""


class Api(Protocol):
    """One API of a server.

    Attributes:
        path: Path of requests.
        streams: Whether answers can be streamed.
    """

    path: str
    streams: bool

    def body(
        self, turn: BenchTurn, history: History, model: str, adapter: str | None
    ) -> dict[str, Any]:
        """Build the body of a request."""
        ...

    def read(self, event: Mapping[str, Any], reception: TokenTimer, now_s: float) -> None:
        """Parse one event of a stream, or the whole answer.

        Raises:
            LookupError, TypeError, AttributeError: It has another format.
        """
        ...


class GenerateApi:
    """SGLang's `/generate`, whose events repeat the text and count its tokens."""

    path = "/generate"
    streams = True

    def __init__(self, config: AnswerConfig) -> None:
        self._config = config

    def body(
        self, turn: BenchTurn, history: History, model: str, adapter: str | None
    ) -> dict[str, Any]:
        config = self._config
        exact = turn.token_ids and not history
        body: dict[str, Any] = {
            **({"input_ids": list(turn.token_ids)} if exact else {"text": _whole(turn, history)}),
            "sampling_params": {
                "temperature": config.temperature,
                "top_p": config.top_p,
                "max_new_tokens": turn.output_tokens,
                "ignore_eos": config.ignore_eos,
            },
            "stream": config.stream,
        }
        if config.logprobs or config.top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": config.top_logprobs}
        return body if adapter is None else {**body, "lora_path": adapter}

    def read(self, event: Mapping[str, Any], reception: TokenTimer, now_s: float) -> None:
        meta, outcome = event["meta_info"], reception.outcome
        total = int(meta["completion_tokens"])  # not all tokens have text
        reception.tokens(total - outcome.output_tokens, now_s)
        outcome.output_tokens = total
        outcome.text = event["text"]
        outcome.prompt_tokens = int(meta.get("prompt_tokens", outcome.prompt_tokens))
        outcome.cached_tokens = int(meta.get("cached_tokens") or 0)
        outcome.accept_length = meta.get("spec_accept_length", outcome.accept_length)


class Completions:
    """OpenAI's `/v1/completions`."""

    path = "/v1/completions"
    streams = True

    def __init__(self, config: AnswerConfig) -> None:
        self._config = config

    def body(
        self, turn: BenchTurn, history: History, model: str, adapter: str | None
    ) -> dict[str, Any]:
        exact = turn.token_ids and not history
        body = {
            "prompt": list(turn.token_ids) if exact else _whole(turn, history),
            "max_tokens": turn.output_tokens,
            **_openai_fields(self._config, adapter or model),
        }
        if self._config.logprobs or self._config.top_logprobs:
            body["logprobs"] = max(1, self._config.top_logprobs)
        return body

    def read(self, event: Mapping[str, Any], reception: TokenTimer, now_s: float) -> None:
        for choice in event.get("choices", ()):
            _piece(reception, choice.get("text"), now_s)
        _usage(event, reception.outcome)


class Chat:
    """OpenAI's `/v1/chat/completions`."""

    path = "/v1/chat/completions"
    streams = True

    def __init__(self, config: AnswerConfig) -> None:
        self._config = config

    def body(
        self, turn: BenchTurn, history: History, model: str, adapter: str | None
    ) -> dict[str, Any]:
        earlier: list[Mapping[str, object]] = []
        for question, answer in history:
            earlier.append({"role": "user", "content": question})
            earlier.append({"role": "assistant", "content": answer})
        now = turn.messages or [{"role": "user", "content": turn.text}]
        body = {
            "messages": [*earlier, *now],
            "max_completion_tokens": turn.output_tokens,
            **_openai_fields(self._config, adapter or model),
        }
        if self._config.logprobs or self._config.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": self._config.top_logprobs}
        return body

    def read(self, event: Mapping[str, Any], reception: TokenTimer, now_s: float) -> None:
        for choice in event.get("choices", ()):
            message = choice.get("delta") or choice.get("message") or {}
            for name in ("reasoning_content", "content"):
                _piece(reception, message.get(name), now_s)
        _usage(event, reception.outcome)


class EmbeddingsApi:
    """OpenAI's `/v1/embeddings`."""

    path = "/v1/embeddings"
    streams = False

    def __init__(self, config: AnswerConfig) -> None:
        del config  # generates nothing

    def body(
        self, turn: BenchTurn, history: History, model: str, adapter: str | None
    ) -> dict[str, Any]:
        del history
        return {"input": list(turn.token_ids) or turn.text, "model": adapter or model}

    def read(self, event: Mapping[str, Any], reception: TokenTimer, now_s: float) -> None:
        del now_s
        if not event["data"]:
            raise LookupError("the answer holds no embedding")
        reception.outcome.prompt_tokens = int(event["usage"]["prompt_tokens"])


APIS: Mapping[str, type[GenerateApi | Completions | Chat | EmbeddingsApi]] = {
    "native": GenerateApi,
    "completions": Completions,
    "chat": Chat,
    "embeddings": EmbeddingsApi,
}


def _openai_fields(config: AnswerConfig, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "ignore_eos": config.ignore_eos,
        "stream": config.stream,
        **({"stream_options": {"include_usage": True}} if config.stream else {}),
    }


def _piece(reception: TokenTimer, text: str | None, now_s: float) -> None:
    if text:
        reception.tokens(1, now_s)
        reception.outcome.text += text


def _usage(event: Mapping[str, Any], outcome: RequestRecord) -> None:
    usage = event.get("usage")
    if not usage:
        return
    outcome.prompt_tokens = int(usage["prompt_tokens"])
    outcome.output_tokens = int(usage["completion_tokens"])
    details = usage.get("prompt_tokens_details") or {}
    outcome.cached_tokens = int(details.get("cached_tokens") or 0)


def _whole(turn: BenchTurn, history: History) -> str:
    """Return a prompt that repeats the history."""
    return "".join([*(question + answer for question, answer in history), turn.text])
