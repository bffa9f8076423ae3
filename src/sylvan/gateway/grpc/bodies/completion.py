"""`/v1/completions` over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.openai.common import openai_sampling, usage_reply
from sylvan.api.openai.completions import DEFAULT_MAX_TOKENS, CompletionBody, prompts_of
from sylvan.api.sampling import SamplingDefaults
from sylvan.api.validation import parse
from sylvan.gateway.grpc.bodies.common import (
    DONE,
    Frame,
    check_passed,
    collected,
    detokenizer_options,
    event,
    single_prompt,
    usage_of,
)
from sylvan.gateway.grpc.context import Prepared, RequestInput, SampleDelta
from sylvan.gateway.text.model import ModelText
from sylvan.text.output import OutputRules

PASSED = frozenset(
    {
        *("model", "prompt", "max_tokens", "min_tokens", "n", "stream", "stream_options", "user"),
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim"),
        *("skip_special_tokens", "logit_bias", "stream_interval", "custom_params", "metadata"),
        *("regex", "ebnf", "json_schema", "structural_tag", "response_format"),
    }
)
_NEUTRAL: Sequence[object] = (None, False, [], {}, "", 0)


async def prepare(
    given: RequestInput, text: ModelText, model: str | None, frame: Frame
) -> Prepared:
    """Read a body.

    Raises:
        RequestError: Names the field, and what is wrong with it.
    """
    body = parse(CompletionBody, given.asked.fields)
    check_passed(body, PASSED, _NEUTRAL)
    prompt = single_prompt(prompts_of(body), "prompt")
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = openai_sampling(body, SamplingDefaults(), limit)
    ids = await text.ids.of(prompt) if isinstance(prompt, str) else prompt
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Prepared(
        model=model,
        text=text,
        input_ids=ids,
        sampling=sampling,
        detokenizer=detokenizer_options(sampling),
        rules=OutputRules(),
        format=CompletionFormat(given.caller.request_id, frame, sampling.n, usage=usage),
        namespace=given.asked.namespace,
    )


class CompletionFormat:
    """The answer of `/v1/completions`."""

    def __init__(self, name: str, frame: Frame, n: int, *, usage: bool) -> None:
        self._frame: dict[str, Any] = {
            "id": name,
            "object": "text_completion",
            "created": frame.created,
            "model": frame.model,
        }
        self._samples = collected(n)
        self._usage = usage

    def events(self, delta: SampleDelta) -> bytes:
        """See `ReplyFormat.events`."""
        self._samples[delta.index].add(delta)
        if not delta.text and delta.finish is None:
            return b""
        choice = self._choice(delta.index, delta.text, delta)
        return event({**self._frame, "choices": [choice]})

    def end(self) -> bytes:
        """See `ReplyFormat.end`."""
        last: dict[str, Any] = {**self._frame, "choices": [], "usage": self._counts()}
        return (event(last) if self._usage else b"") + DONE

    def whole(self) -> Any:
        """See `ReplyFormat.whole`."""
        choices = [self._choice(i, s.text, s) for i, s in enumerate(self._samples)]
        return {**self._frame, "choices": choices, "usage": self._counts()}

    def _choice(self, index: int, text: str, part: Any) -> dict[str, Any]:
        finish = part.finish
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish.type if finish else None,
            "matched_stop": finish.matched if finish else None,
        }

    def _counts(self) -> dict[str, Any]:
        return usage_reply(usage_of(self._samples), len(self._samples), cached=True)
