"""What the routes share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel

from sylvan.gateway.grpc.context import SampleText
from sylvan.gateway.http.asked import ParsedBody
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.sampling import SamplingParams
from sylvan.text.detokenizer import DetokenizerOptions

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class EventHeader:
    """What every event of an answer has: the model's name, and the time in seconds since 1970."""

    model: str
    created: int


def check_passed(body: BaseModel, passed: Collection[str], neutral: Sequence[object]) -> None:
    """Refuse what would be ignored otherwise.

    Args:
        body: What came.
        passed: Fields that are honoured.
        neutral: Values of others that ask for nothing.

    Raises:
        RequestError: Names the first field that is not honoured (501).
    """
    given = {name: getattr(body, name) for name in body.model_fields_set}
    given |= body.model_extra or {}
    for name, value in given.items():
        if name not in passed and value not in neutral:
            message = f"{name} is not passed on to workers that speak gRPC."
            raise RequestError(message, param=name, status=501)


def detokenizer_options(sampling: SamplingParams) -> DetokenizerOptions:
    """How the ids of a request become text."""
    return DetokenizerOptions(
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        stop=sampling.stop,
        no_stop_trim=sampling.no_stop_trim,
    )


def single_prompt(prompts: Sequence[Any], field_name: str) -> Any:
    """The one prompt of a body.

    Raises:
        RequestError: There are several.
    """
    if len(prompts) != 1:
        message = f"{field_name}: workers that speak gRPC take one prompt a request."
        raise RequestError(message, param=field_name, status=501)
    return prompts[0]


def event(content: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


@dataclass(slots=True)
class CollectedSample:
    """All of one sample so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    usage: Usage = field(default_factory=Usage)
    finish: Finish | None = None

    def add(self, delta: SampleText) -> None:
        """Append what is new."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.usage = delta.usage
        self.finish = delta.finish or self.finish


def collected(n: int) -> list[CollectedSample]:
    """Room for so many samples."""
    return [CollectedSample() for _ in range(n)]


def usage_of(samples: Sequence[CollectedSample]) -> list[Usage]:
    """Counts of all samples, in order."""
    return [sample.usage for sample in samples]


def adapter_of(asked: ParsedBody, model: str | None, lora_path: str | None) -> str | None:
    """The adapter that a body asks for: as `lora_path`, or by `base:adapter` as its model.

    Args:
        asked: The body.
        model: Name by which workers are looked for; None: any will do.
        lora_path: Of the body.
    """
    if lora_path:
        return lora_path
    if asked.model == model:
        return None  # a model whose name has a colon
    return (asked.model or "").partition(":")[2] or None
