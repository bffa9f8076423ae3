"""Converts gRPC messages to engine input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict

from sylvan.api.answering import GrammarWithThinking, thinking_of
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.requests import LogprobOptions, RequestOptions, ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.tokenizer.types import EmbedInput, GenerateInput, SampleDelta
from sylvan.text.parsers import Parsers

MAX_MARKERS = 64
MAX_MARKER_TOKENS = 256
MAX_TOKEN = 2**31 - 1
_PLAIN = ("temperature", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos")
_PLAIN_FLAGS = ("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")
_ZERO_IS_ABSENT = ("top_p", "top_k", "repetition_penalty", "n")
_GRAMMARS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}


def generate_input(
    message: pb.GenerateRequest, tenant: str, deadline_s: float | None, parsers: Parsers
) -> GenerateInput:
    """Convert a `GenerateRequest`.

    Args:
        message: The message.
        tenant: The tenant.
        deadline_s: Seconds until the client's deadline; None: none.
        parsers: Parsers of the model; they know how thinking ends.

    Raises:
        RequestError: A field is malformed or not supported; the message names it.
    """
    _refuse_absent(message)
    seed = message.default_seed if message.HasField("default_seed") else None
    given = message.HasField("sampling_params")
    sampling = sampling_of(message.sampling_params) if given else SamplingParams()
    return GenerateInput(
        input_ids=list(message.tokenized.input_ids),
        sampling=sampling,
        logprobs=_logprobs(message),
        lora=message.lora_id or None,
        rid=message.request_id or None,
        tenant=tenant,
        stream=message.stream,
        options=RequestOptions(deadline_s=deadline_s),
        default_seed=seed,
        past=tuple(map(_emitted, message.emitted)) or None,
        thinking=_thinking(message, parsers, has_grammar=sampling.grammar is not None),
    )


def _thinking(
    message: pb.GenerateRequest, parsers: Parsers, *, has_grammar: bool
) -> ThinkingOptions | None:
    """Return where the output contains thinking, as given or by the model's format."""
    if message.HasField("thinking"):
        given = message.thinking
        ends = _rows(given.ends, "ends")
        if not ends:
            raise RequestError("thinking.ends: expected a marker", param="thinking.ends")
        return ThinkingOptions(
            ends=ends,
            starts=_rows(given.starts, "starts"),
            headers=_rows(given.headers, "headers"),
            inside=given.inside,
        )
    if not message.require_reasoning:
        return None
    if parsers.reasoning is None:
        text = "require_reasoning: this server knows no format of thinking (--reasoning-parser)"
        raise RequestError(text, param="require_reasoning")
    grammar = GrammarWithThinking(may_open=False) if has_grammar else None
    return thinking_of(parsers, inside=True, budget=None, grammar=grammar)


def _rows(given: Sequence[pb.TokenIds], name: str) -> tuple[tuple[int, ...], ...]:
    """Read token ID sequences of markers.

    Raises:
        RequestError: There are too many, or one is empty or too long.
    """
    rows = tuple(tuple(row.ids) for row in given)
    if len(rows) > MAX_MARKERS or not all(0 < len(row) <= MAX_MARKER_TOKENS for row in rows):
        text = f"thinking.{name}: expected at most {MAX_MARKERS} markers, each of 1 to"
        text += f" {MAX_MARKER_TOKENS} tokens"
        raise RequestError(text, param=f"thinking.{name}")
    if any(token > MAX_TOKEN for row in rows for token in row):
        text = f"thinking.{name}: a token is above {MAX_TOKEN}"
        raise RequestError(text, param=f"thinking.{name}")
    return rows


def _emitted(sample: pb.EmittedSample) -> SampleDelta:
    """Read the output that another server generated for a sample."""
    finish = sample.finish_reason
    if finish not in ("", "stop", "length", "abort"):
        raise RequestError(f"emitted: {finish[:40]!r} is not a finish_reason", param="emitted")
    return SampleDelta(
        rid="",
        index=sample.index,
        text="",
        token_ids=tuple(sample.token_ids),
        usage=Usage(
            prompt_tokens=sample.prompt_tokens,
            completion_tokens=sample.completion_tokens,
            cached_tokens=sample.cached_tokens,
        ),
        finish=Finish(type=finish) if finish else None,
    )


def embed_input(message: pb.EmbedRequest, tenant: str, deadline_s: float | None) -> EmbedInput:
    """Convert an `EmbedRequest`.

    Raises:
        RequestError: As for `generate_input`.
    """
    if message.HasField("mm_inputs"):
        raise _absent("mm_inputs", "images, audio and video")
    if message.token_type_ids:
        raise _absent("token_type_ids", "segments by number (texts takes a pair)")
    if len(message.texts) > 2:
        raise RequestError("texts: expected one text, or a pair", param="texts")
    texts = list(message.texts)
    return EmbedInput(
        text=texts[0] if texts else None,
        pair=texts[1] if len(texts) == 2 else None,
        input_ids=None if texts else list(message.tokenized.input_ids),
        rid=message.request_id or None,
        tenant=tenant,
        deadline_s=deadline_s,
    )


def sampling_of(message: pb.SamplingParams) -> SamplingParams:
    """Convert sampling parameters; 0 means "not set" where 0 is out of range.

    Raises:
        RequestError: A value is out of range; the message names the field.
    """
    values: dict[str, Any] = {name: getattr(message, name) for name in (*_PLAIN, *_PLAIN_FLAGS)}
    values |= {name: value for name in _ZERO_IS_ABSENT if (value := getattr(message, name))}
    values["min_new_tokens"] = message.min_new_tokens
    values["max_new_tokens"] = (
        message.max_new_tokens if message.HasField("max_new_tokens") else None
    )
    values["stop"] = tuple(message.stop)
    values["stop_token_ids"] = tuple(message.stop_token_ids)
    values["logit_bias"] = dict(message.logit_bias)
    if message.HasField("stream_interval"):
        values["stream_interval"] = message.stream_interval
    if message.HasField("sampling_seed"):
        values["sampling_seed"] = message.sampling_seed
    grammar = message.WhichOneof("constraint")
    if grammar is not None:
        values[_GRAMMARS[grammar]] = getattr(message, grammar)
    if message.HasField("custom_params"):
        values["custom_params"] = MessageToDict(message.custom_params)
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        name = path.strip("`$.") or "sampling_params"
        raise RequestError(f"sampling_params.{name}: {why}", param=name) from error


def _logprobs(message: pb.GenerateRequest) -> LogprobOptions | None:
    if not message.return_logprob:
        return None
    start = message.logprob_start_len
    return LogprobOptions(
        start=None if start < 0 else start,
        top=message.top_logprobs_num,
        token_ids=tuple(message.token_ids_logprob),
    )


def _refuse_absent(message: pb.GenerateRequest) -> None:
    lacks = {
        "mm_inputs": (message.HasField("mm_inputs"), "images, audio and video"),
        "disaggregated_params": (
            message.HasField("disaggregated_params"),
            "prefill and decode on different servers",
        ),
        "return_hidden_states": (message.return_hidden_states, "returning hidden states"),
        "custom_logit_processor": (message.custom_logit_processor, "custom logit processors"),
        "input_embeds": (message.input_embeds, "vectors as prompts"),
        "data_parallel_rank": (message.data_parallel_rank, "choosing a rank over gRPC"),
    }
    for name, (given, feature) in lacks.items():
        if given:
            raise _absent(name, feature)


def _absent(name: str, feature: str) -> RequestError:
    return RequestError(f"{name}: not supported: {feature}", param=name, status=501)
