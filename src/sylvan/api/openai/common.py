"""Fields and helpers that the OpenAI bodies share."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.native import join_salt
from sylvan.api.request_fields import (
    SPELLED,
    MoreSamplingFields,
    Name,
    OptionFields,
    Rid,
    sampling_values,
)
from sylvan.api.sampling import OBJECT_SCHEMA, SamplingDefaults, read_sampling
from sylvan.api.validation import WireModel
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Usage
from sylvan.protocol.sampling import SamplingParams

MAX_STRINGS = 2048


class JsonSchema(WireModel):
    """A JSON schema for the answer."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | Literal["grammar"] | None = None
    """`grammar`: reject a schema that the grammar alone cannot enforce; else the rest is checked
    while generating, and violating output is regenerated."""

    @property
    def without_effect(self) -> Collection[str]:
        return ("name", "description")


class ResponseFormat(WireModel):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """For `json_object`: the schema of the object."""

    @property
    def passes_on(self) -> bool:
        """A structural tag is validated as a whole elsewhere."""
        return self.type == "structural_tag"

    @property
    def without_effect(self) -> Collection[str]:
        if self.passes_on:
            return ()
        read = {"json_object": "schema_", "json_schema": "json_schema"}.get(self.type)
        return tuple(name for name in ("schema_", "json_schema") if name != read)


class StreamOptions(WireModel):
    """Options of a stream."""

    include_usage: bool | None = False
    """End with a chunk that contains the usage."""
    continuous_usage_stats: bool | None = False
    """Usage so far in every chunk."""


class GenerationBody(MoreSamplingFields, OptionFields):
    """Fields common to completions and chat completions."""

    model: Name | None = None
    """Model name; any name is accepted, `base:adapter` selects an adapter."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    json_schema: str | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    lora_path: Name | None = None
    rid: Rid | None = None
    extra_key: Name | None = None
    cache_salt: Name | None = None
    return_cached_tokens_details: bool | None = None
    """Report in `sglext` where cached prompt tokens came from."""

    @property
    def without_effect(self) -> Collection[str]:
        return () if self.stream else ("stream_options",)


def openai_sampling(
    body: GenerationBody,
    defaults: SamplingDefaults,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    overrides: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Convert the sampling parameters of an OpenAI body.

    Args:
        body: The body.
        defaults: Values for fields left out.
        max_tokens: Most output tokens; None: the rest of the context.
        max_tokens_name: Which field the client used.
        overrides: Values set by the route.

    Raises:
        RequestError: A value is invalid; the message names the client's field, and the limit.
    """
    params = sampling_values(body)
    params["max_new_tokens"] = max_tokens
    params.update(_grammar(body))
    params.update(overrides or {})
    names = {**SPELLED, **grammar_fields(body), "max_new_tokens": max_tokens_name}
    return read_sampling(params, {**defaults.model, **defaults.preferred}, "", names)


def _grammar(body: GenerationBody) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("json_schema", "structural_tag"):
        value = getattr(body, name)
        if value:
            found[name] = value if isinstance(value, str) else json.dumps(value)
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return found
    if found:
        name = next(iter(found))
        message = f"response_format: {name} is set too, but an output has one grammar."
        raise RequestError(message, param="response_format")
    if wanted.type == "json_object":
        found["json_schema"] = json.dumps(wanted.schema_) if wanted.schema_ else OBJECT_SCHEMA
    elif wanted.type == "structural_tag":
        found["structural_tag"] = json.dumps(wanted.model_dump(by_alias=True, exclude_none=True))
    elif wanted.json_schema is None or wanted.json_schema.schema_ is None:
        path = "response_format.json_schema.schema"
        raise RequestError(f"{path} must be given.", param=path)
    else:
        found["json_schema"] = json.dumps(wanted.json_schema.schema_)
        found["strict_grammar"] = wanted.json_schema.strict == "grammar"
    return found


def grammar_fields(body: GenerationBody) -> Mapping[str, str]:
    """Map the engine's grammar fields (`json_schema`, ...) to fields of the body."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "structural_tag":
        return {"structural_tag": "response_format"}
    if wanted.type == "json_schema":
        return {"json_schema": "response_format.json_schema.schema"}
    return {"json_schema": "response_format.schema" if wanted.schema_ else "response_format"}


def salt_of(body: GenerationBody) -> str:
    """Return the salt that isolates the request's cached prefixes."""
    return join_salt(body.extra_key, body.cache_salt)


def adapter_fields(body: GenerationBody) -> dict[str, str]:
    """Map the engine's `lora_path` to a field of the body."""
    return {} if body.lora_path else {"lora_path": "model"}


class PromptTokensDetails(BaseModel):
    """Origin of prompt tokens."""

    cached_tokens: int = 0
    image_tokens: int | None = None
    video_tokens: int | None = None
    audio_tokens: int | None = None


class CompletionTokensDetails(BaseModel):
    """Breakdown of output tokens."""

    reasoning_tokens: int


class UsageReply(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_reply(
    usages: list[Usage], n: int, *, cached: bool, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Build the `usage` of an answer; the prompt of `n` samples counts once.

    Args:
        usages: Token counts of each sample, prompt by prompt.
        n: Samples per prompt.
        cached: Whether to report cached prompt tokens.
        reasoning_tokens: Number of reasoning tokens in the output.
    """
    firsts = usages[::n]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    completion = sum(usage.completion_tokens for usage in usages)
    reply: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reasoning_tokens": reasoning_tokens,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
    details = _media_details(firsts)
    if cached:
        details["cached_tokens"] = sum(usage.cached_tokens for usage in firsts)
    if details:
        reply["prompt_tokens_details"] = details
    return reply


def _media_details(usages: Sequence[Usage]) -> dict[str, int]:
    """Count the tokens of images, videos and audio, under OpenAI's names."""
    found: dict[str, int] = {}
    for usage in usages:
        for kind, count in (usage.media_tokens or {}).items():
            found[f"{kind}_tokens"] = found.get(f"{kind}_tokens", 0) + count
    return found
