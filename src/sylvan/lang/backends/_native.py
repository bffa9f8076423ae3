"""Backends that use the runtime's own `/generate`, over HTTP or in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sylvan.lang.backends.api import BaseBackend, Meta, StreamItem
from sylvan.lang.cancel import CancelScope
from sylvan.lang.choices import (
    ChoicesDecision,
    ChoicesMethod,
    TokenLogprob,
    mean_logprob,
    token_length_normalized,
)
from sylvan.lang.context import StateContext
from sylvan.lang.errors import BackendError
from sylvan.lang.sampling import GenParams
from sylvan.lang.settings import global_config
from sylvan.media.source import FRAMES

Body = dict[str, Any]
_PREFILL = 0  # max_new_tokens of a request that only computes and caches its prompt


class NativeBackend(BaseBackend):
    """Maps programs to generate requests. Subclasses send the requests."""

    def send(self, body: Body, scope: CancelScope | None = None) -> Any:
        """Send a request; return an object, or a list for a batch or several samples."""
        raise NotImplementedError

    def send_stream(self, body: Body, scope: CancelScope) -> Iterator[Body]:
        """Yield the chunks of the answer; each has the whole text so far, or only new text."""
        raise NotImplementedError

    def generate(self, s: StateContext, sampling_params: GenParams) -> tuple[Any, Any]:
        answer = self.send(_gen_body(s, sampling_params), s.scope)
        if isinstance(answer, list):
            return [x["text"] for x in answer], [x["meta_info"] for x in answer]
        return answer["text"], answer["meta_info"]

    def generate_stream(self, s: StateContext, sampling_params: GenParams) -> Iterator[StreamItem]:
        body = {**_gen_body(s, sampling_params), "stream": True}
        samples: defaultdict[int, _Stream] = defaultdict(_Stream)
        for chunk in self.send_stream(body, s.scope):
            if "error" in chunk:
                raise BackendError(_stream_error(chunk["error"]))
            sample = chunk.get("index") or 0
            text, meta = samples[sample].take(chunk)
            yield text, meta, sample

    def cache_prefix(self, prefix_str: str) -> None:
        self.send({"text": prefix_str, "sampling_params": {"max_new_tokens": _PREFILL}})

    def commit_lazy_operations(self, s: StateContext) -> None:
        self.send(_prompt_body(s, s.text_, {"max_new_tokens": _PREFILL}), s.scope)

    def fill_image(self, s: StateContext) -> None:
        self.commit_lazy_operations(s)

    def select(
        self,
        s: StateContext,
        choices: Sequence[str],
        temperature: float,
        choices_method: ChoicesMethod = token_length_normalized,
    ) -> ChoicesDecision:
        """See `BaseBackend.select`.

        The prompt is computed first, so that it is cached when the choices are scored together.

        Raises:
            ValueError: `temperature` is not 0; choices are scored, not sampled.
        """
        if temperature > 1e-5:
            raise ValueError(f"select needs temperature 0, not {temperature}")
        prompt = self.send(_prompt_body(s, s.text_, {"max_new_tokens": _PREFILL}), s.scope)
        prompt_len = prompt["meta_info"]["prompt_tokens"]
        greedy = {"max_new_tokens": _PREFILL, "temperature": 0}
        body = _prompt_body(s, [s.text_ + choice for choice in choices], greedy)
        body |= {
            "return_logprob": True,
            "return_text_in_logprobs": True,
            # From before the last prompt token, which a choice may merge with.
            "logprob_start_len": max(prompt_len - 2, 0),
        }
        metas: list[Meta] = [answer["meta_info"] for answer in self.send(body, s.scope)]
        tokens = [_choice_tokens(meta, prompt_len, s.text_) for meta in metas]
        alone = None
        if choices_method.requires_unconditional_logprobs:
            alone = self._unconditional(s, tokens)
        return choices_method(
            choices=choices,
            normalized_prompt_logprobs=[mean_logprob(row) for row in tokens],
            input_token_logprobs=tokens,
            output_token_logprobs=[meta["output_token_logprobs"] for meta in metas],
            unconditional_token_logprobs=alone,
        )

    def _unconditional(
        self, s: StateContext, tokens: Sequence[Sequence[TokenLogprob]]
    ) -> list[list[TokenLogprob]]:
        body: Body = {
            "input_ids": [[token[1] for token in row] for row in tokens],
            "sampling_params": {"max_new_tokens": _PREFILL},
            "return_logprob": True,
            # SGLang's client leaves this out, and gets no log probabilities from today's servers.
            "logprob_start_len": 0,
        }
        answers = self.send(_with_pictures(s, body), s.scope)
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]


@dataclass(slots=True)
class _Stream:
    """The stream of one sample, in either chunk format.

    By default a chunk contains everything so far; a server with `--incremental-streaming-output`
    sends only new output, which the number of token ids reveals.
    """

    incremental: bool = False
    num_tokens: int = 0
    num_chars: int = 0
    lists: Meta = field(default_factory=dict[str, Any])  # lists in the metadata, by key

    def take(self, chunk: Body) -> tuple[str, Meta]:
        """New text, and the accumulated metadata."""
        text: str = chunk["text"]
        meta: Meta = chunk["meta_info"]
        total = meta.get("completion_tokens") or 0
        ids = chunk.get("output_ids")
        if ids is not None and len(ids) != total:
            self.incremental |= len(ids) == total - self.num_tokens
        start = 0 if self.incremental else self.num_chars
        self.num_tokens, self.num_chars = total, len(text)
        for key, values in meta.items():
            if key.startswith("output_") and isinstance(values, list):
                known = self.lists.get(key, []) if self.incremental else []
                self.lists[key] = [*known, *values]
        return text[start:], {**meta, **self.lists}


def _choice_tokens(meta: Meta, prompt_len: int, prompt: str) -> list[TokenLogprob]:
    """The tokens of a choice: those after the prompt, and one that merged with the prompt.

    `input_token_logprobs` ends with the request's last token. The token in the place of the
    prompt's last one is that very token if its text ends the prompt, else a merged ("healed") one.
    """
    rows: list[TokenLogprob] = meta["input_token_logprobs"]
    first = meta["prompt_tokens"] - len(rows)  # position of rows[0]
    start = max(prompt_len - 1 - first, 0)
    text = rows[start][2] if start < len(rows) - 1 else None
    if text is not None and prompt.endswith(text):
        start += 1
    return rows[start:]


def _gen_body(s: StateContext, params: GenParams) -> Body:
    sampling = {
        "skip_special_tokens": global_config.skip_special_tokens_in_output,
        "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
        **params.to_wire(),
    }
    return {**_prompt_body(s, s.text_, sampling), **params.logprob_options()}


def _prompt_body(s: StateContext, text: str | list[str], sampling: Body) -> Body:
    return _with_pictures(s, {"text": text, "sampling_params": sampling})


def _with_pictures(s: StateContext, body: Body) -> Body:
    for name, some in (("image_data", False), ("video_data", True)):
        found = [data for _, data in s.images_ if data.startswith(FRAMES) is some]
        if found:
            body[name] = found[0] if len(found) == 1 else found
    return body


def _stream_error(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
