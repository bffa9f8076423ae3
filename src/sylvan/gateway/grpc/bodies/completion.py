"""`/v1/completions` over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.logprobs import CompletionLogprobs, CompletionToken
from sylvan.api.openai.common import openai_sampling, usage_reply
from sylvan.api.openai.completion_logprobs import CompletionTokenLog
from sylvan.api.openai.completions import DEFAULT_MAX_TOKENS, CompletionBody, prompts_of
from sylvan.api.sampling import SamplingDefaults
from sylvan.api.validation import parse
from sylvan.gateway.grpc.bodies.common import (
    DONE,
    EventHeader,
    adapter_of,
    check_passed,
    collected,
    detokenizer_options,
    event,
    single_prompt,
    usage_of,
)
from sylvan.gateway.grpc.context import PreparedRequest, RequestInput, SampleText
from sylvan.gateway.text.model import ModelText
from sylvan.protocol.requests import LogprobOptions
from sylvan.text.output import OutputRules
from sylvan.text.visible_tokens import VisibleTokens

PASSED = frozenset(
    {
        *("model", "prompt", "max_tokens", "min_tokens", "n", "stream", "stream_options", "user"),
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim"),
        *("skip_special_tokens", "logit_bias", "stream_interval", "custom_params", "metadata"),
        *("regex", "ebnf", "json_schema", "structural_tag", "response_format", "logprobs"),
        "lora_path",
    }
)
_LOG_FIELDS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
_NEUTRAL: Sequence[object] = (None, False, [], {}, "", 0)


async def prepare(
    given: RequestInput, text: ModelText, model: str | None, frame: EventHeader
) -> PreparedRequest:
    """Parse a body.

    Raises:
        RequestError: The body is invalid; the message names the field and the reason.
    """
    body = parse(CompletionBody, given.parsed.fields)
    check_passed(body, PASSED, _NEUTRAL)
    prompt = single_prompt(prompts_of(body), "prompt")
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = openai_sampling(body, SamplingDefaults(), limit)
    ids = await text.ids.of(prompt) if isinstance(prompt, str) else prompt
    wanted = None if body.logprobs is None else LogprobOptions(top=body.logprobs)
    skip = sampling.skip_special_tokens
    logs = [token_log(text, body.logprobs, skip=skip) for _ in range(sampling.n)]
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return PreparedRequest(
        model=model,
        text=text,
        input_ids=ids,
        sampling=sampling,
        detokenizer=detokenizer_options(sampling),
        rules=OutputRules(),
        format=CompletionFormat(given.caller.request_id, frame, logs, usage=usage),
        namespace=given.parsed.namespace,
        logprobs=wanted,
        adapter=adapter_of(given.parsed, model, body.lora_path),
    )


def token_log(text: ModelText, top: int | None, *, skip: bool) -> CompletionTokenLog | None:
    """Make the recorder of one choice's log probabilities; None if none were requested.

    Args:
        text: Text processing of the model.
        top: Number of alternatives per token; None: no log probabilities.
        skip: Whether special tokens are left out of the text.
    """
    if top is None:
        return None
    tokenizer = text.tokenizer
    visible = VisibleTokens[CompletionToken](tokenizer, skip_special_tokens=skip)
    return CompletionTokenLog(CompletionLogprobs(tokenizer.token_text, top), visible)


class CompletionFormat:
    """Formats the answer of `/v1/completions`."""

    def __init__(
        self,
        name: str,
        frame: EventHeader,
        logs: Sequence[CompletionTokenLog | None],
        *,
        usage: bool,
    ) -> None:
        """Take one entry of `logs` per sample; None: no log probabilities were requested."""
        self._frame: dict[str, Any] = {
            "id": name,
            "object": "text_completion",
            "created": frame.created,
            "model": frame.model,
        }
        self._samples = collected(len(logs))
        self._logs = logs
        self._shown: list[list[dict[str, Any]]] = [[] for _ in logs]
        self._usage = usage

    def events(self, delta: SampleText) -> bytes:
        self._samples[delta.index].add(delta)
        logprobs = self._logprobs(delta)
        if not delta.text and delta.finish is None and logprobs is None:
            return b""
        choice = self._choice(delta.index, delta.text, delta, logprobs)
        return event({**self._frame, "choices": [choice]})

    def end(self) -> bytes:
        last: dict[str, Any] = {**self._frame, "choices": [], "usage": self._counts()}
        return (event(last) if self._usage else b"") + DONE

    def whole(self) -> Any:
        choices = [
            self._choice(i, sample.text, sample, self._joined(i))
            for i, sample in enumerate(self._samples)
        ]
        return {**self._frame, "choices": choices, "usage": self._counts()}

    def _logprobs(self, delta: SampleText) -> dict[str, Any] | None:
        log = self._logs[delta.index]
        if log is None:
            return None
        parts = [] if delta.logprobs is None else [delta.logprobs]
        found = log.reply(delta.token_ids, parts, delta.text)
        if not found["tokens"]:
            return None
        self._shown[delta.index].append(found)
        return found

    def _joined(self, index: int) -> dict[str, Any] | None:
        """Join all log probabilities of a sample."""
        if self._logs[index] is None:
            return None
        joined: dict[str, Any] = {}
        for name in _LOG_FIELDS:
            lists = [part[name] for part in self._shown[index]]
            known = [values for values in lists if values is not None]
            no_tops = name == "top_logprobs" and not known
            joined[name] = None if no_tops else [value for values in known for value in values]
        return joined

    def _choice(
        self, index: int, text: str, part: Any, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        finish = part.finish
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish.type if finish else None,
            "matched_stop": finish.matched if finish else None,
        }

    def _counts(self) -> dict[str, Any]:
        return usage_reply(usage_of(self._samples), len(self._samples), cached=True)
