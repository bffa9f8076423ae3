"""From messages of gRPC to what the engine takes."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict

from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.tokenizer.types import EmbedInput, GenerateInput, SampleDelta

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
    message: pb.GenerateRequest, tenant: str, deadline_s: float | None
) -> GenerateInput:
    """What a client wants generated.

    Args:
        message: As it came.
        tenant: Who asks.
        deadline_s: How long the client waits; None: for ever.

    Raises:
        RequestError: It asks for what is not there, or a field is malformed; names the field.
    """
    _refuse_absent(message)
    seed = message.default_seed if message.HasField("default_seed") else None
    return GenerateInput(
        input_ids=list(message.tokenized.input_ids),
        sampling=sampling_of(message.sampling_params)
        if message.HasField("sampling_params")
        else SamplingParams(),
        logprobs=_logprobs(message),
        lora=message.lora_id or None,
        rid=message.request_id or None,
        tenant=tenant,
        stream=message.stream,
        deadline_s=deadline_s,
        default_seed=seed,
        past=tuple(map(_emitted, message.emitted)) or None,
    )


def _emitted(sample: pb.EmittedSample) -> SampleDelta:
    """What another server gave of a sample."""
    finish = sample.finish_reason
    if finish not in ("", "stop", "length", "abort"):
        raise RequestError(f"emitted: {finish[:40]!r} is no finish_reason", param="emitted")
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
    """What a client wants turned into a vector.

    Raises:
        RequestError: As `generate_input`.
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
    """Sampling parameters; 0 means "not given" where it is out of range.

    Raises:
        RequestError: A value is out of range; names the field.
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
        "require_reasoning": (message.require_reasoning, "reasoning without a template"),
        "data_parallel_rank": (message.data_parallel_rank, "choosing a rank over gRPC"),
    }
    for name, (given, feature) in lacks.items():
        if given:
            raise _absent(name, feature)


def _absent(name: str, feature: str) -> RequestError:
    return RequestError(f"{name}: not supported: {feature}", param=name, status=501)
