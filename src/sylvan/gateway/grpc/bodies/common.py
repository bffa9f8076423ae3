"""Helpers shared by the routes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel

from sylvan.gateway.grpc.context import SampleText
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.sampling import SamplingParams
from sylvan.text.detokenizer import DetokenizerOptions

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class EventHeader:
    """Fields common to all events of an answer: the model, and the Unix time of the answer."""

    model: str
    created: int


def check_passed(body: BaseModel, passed: Collection[str], neutral: Sequence[object]) -> None:
    """Reject fields that would otherwise be ignored.

    Args:
        body: The request body.
        passed: Fields that are supported.
        neutral: Values of other fields that change nothing.

    Raises:
        RequestError: A field is not supported (501); the message names the first one.
    """
    given = {name: getattr(body, name) for name in body.model_fields_set}
    given |= body.model_extra or {}
    for name, value in given.items():
        if name not in passed and value not in neutral:
            message = f"{name} is not passed on to workers that speak gRPC."
            raise RequestError(message, param=name, status=501)


def detokenizer_options(sampling: SamplingParams) -> DetokenizerOptions:
    """Return how the output IDs of a request are decoded to text."""
    return DetokenizerOptions(
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        stop=sampling.stop,
        no_stop_trim=sampling.no_stop_trim,
    )


def single_prompt(prompts: Sequence[Any], field_name: str) -> Any:
    """Return the only prompt of a body.

    Raises:
        RequestError: The body has several prompts.
    """
    if len(prompts) != 1:
        message = f"{field_name}: workers that speak gRPC take one prompt a request."
        raise RequestError(message, param=field_name, status=501)
    return prompts[0]


def event(content: Any) -> bytes:
    """Format one server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


@dataclass(slots=True)
class CollectedSample:
    """The accumulated output of one sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    usage: Usage = field(default_factory=Usage)
    finish: Finish | None = None

    def add(self, delta: SampleText) -> None:
        """Append a delta."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.usage = delta.usage
        self.finish = delta.finish or self.finish


def collected(n: int) -> list[CollectedSample]:
    """Make empty accumulators for a number of samples."""
    return [CollectedSample() for _ in range(n)]


def usage_of(samples: Sequence[CollectedSample]) -> list[Usage]:
    """Return the token counts of all samples, in order."""
    return [sample.usage for sample in samples]


def adapter_of(parsed: ParsedBody, model: str | None, lora_path: str | None) -> str | None:
    """Return the adapter that a body requests: in `lora_path`, or as `base:adapter` in `model`.

    Args:
        parsed: The request body.
        model: Model name by which workers are selected; None: any worker will do.
        lora_path: The field of the body.
    """
    if lora_path:
        return lora_path
    if parsed.model == model:
        return None  # the model's own name contains a colon
    return (parsed.model or "").partition(":")[2] or None
