"""A backend with scripted answers for tests: instant, deterministic, without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.lang.backends.api import BaseBackend, StreamItem
from sylvan.lang.choices import (
    ChoicesDecision,
    ChoicesMethod,
    mean_logprob,
    token_length_normalized,
)
from sylvan.lang.context import StateContext
from sylvan.lang.sampling import GenParams

Answer = str | Sequence[str] | Callable[[str], str]
Scorer = Callable[[str, str], float]  # (prompt, choice) -> log probability of each of its words


@dataclass(frozen=True, slots=True)
class BackendCall:
    """A call to the backend. `kind` is generate, stream, select, cache or commit."""

    kind: str
    text: str
    params: GenParams | None = None


def _prefer_first(prompt: str, choice: str) -> float:
    del prompt, choice
    return -1.0


class Scripted(BaseBackend):
    """Answers gens from a script, and records the calls.

    Stop strings and the number of samples are respected, token limits are not.

    Args:
        answer: The answer to every gen; a list gives its items in turn, cyclically; a function gets
          the text so far.
        score: Log probability of each word of a choice after a prompt, for `select`.
        is_chat_model: Whether to act like a service that only accepts messages.
        chunk_len: Characters per piece when streaming.
    """

    def __init__(
        self,
        answer: Answer = "ok",
        *,
        score: Scorer = _prefer_first,
        is_chat_model: bool = False,
        chunk_len: int = 3,
    ) -> None:
        super().__init__()
        self.is_chat_model = is_chat_model
        self.calls: list[BackendCall] = []
        self._answer = answer
        self._score = score
        self._chunk_len = chunk_len
        self._lock = threading.Lock()
        self._next = 0

    def get_model_name(self) -> str:
        return "scripted"

    def generate(self, s: StateContext, sampling_params: GenParams) -> tuple[Any, Any]:
        self._record("generate", s, sampling_params)
        texts = [self._text(s, sampling_params) for _ in range(sampling_params.n)]
        metas = [{"finish_reason": {"type": "stop"}, "completion_tokens": len(t)} for t in texts]
        return (texts, metas) if len(texts) > 1 else (texts[0], metas[0])

    def generate_stream(self, s: StateContext, sampling_params: GenParams) -> Iterator[StreamItem]:
        self._record("stream", s, sampling_params)
        texts = [self._text(s, sampling_params) for _ in range(sampling_params.n)]
        for sample, text in enumerate(texts):
            for start in range(0, len(text), self._chunk_len):
                piece = text[start : start + self._chunk_len]
                yield piece, {"completion_tokens": start + len(piece)}, sample

    def select(
        self,
        s: StateContext,
        choices: Sequence[str],
        temperature: float,
        choices_method: ChoicesMethod = token_length_normalized,
    ) -> ChoicesDecision:
        del temperature
        self._record("select", s, None)
        rows = [self._scored(s.text_, choice) for choice in choices]
        alone = [self._scored("", choice) for choice in choices]
        return choices_method(
            choices=choices,
            normalized_prompt_logprobs=[mean_logprob(row) for row in rows],
            input_token_logprobs=rows,
            output_token_logprobs=[[] for _ in choices],
            unconditional_token_logprobs=alone,
        )

    def cache_prefix(self, prefix_str: str) -> None:
        with self._lock:
            self.calls.append(BackendCall("cache", prefix_str))

    def commit_lazy_operations(self, s: StateContext) -> None:
        self._record("commit", s, None)

    def _record(self, kind: str, s: StateContext, params: GenParams | None) -> None:
        with self._lock:
            self.calls.append(BackendCall(kind, s.text_, params))

    def _text(self, s: StateContext, params: GenParams) -> str:
        if callable(self._answer):
            text = self._answer(s.text_)
        elif isinstance(self._answer, str):
            text = self._answer
        else:
            with self._lock:
                text = self._answer[self._next % len(self._answer)]
                self._next += 1
        stops = params.to_protocol().stop
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))]

    def _scored(self, prompt: str, choice: str) -> list[tuple[float, int, str]]:
        score = self._score(prompt, choice)
        return [(score, i, word) for i, word in enumerate(choice.split() or [choice])]
