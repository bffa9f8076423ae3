"""Sampling parameters: the only definition, from the request body to the sampler."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, NamedTuple

import msgspec

MAX_STOPS = 32
MAX_STOP_REGEX_BYTES = 256
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_CHOICES = 4096
MAX_N = 128
MAX_LOGIT_BIAS_VALUE = 100.0
TOP_K_ALL = -1
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "choice")
"""Parameters that constrain the output; a request may set at most one."""

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)

NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopRegex = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_REGEX_BYTES)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to pick tokens and when to stop. Names, defaults and ranges are SGLang's.

    None, where the type allows it, means "not given": the API layer fills it in (the remaining
    context for `max_new_tokens`, a random number for `sampling_seed`).
    """

    max_new_tokens: NonNegativeInt | None = 128
    min_new_tokens: NonNegativeInt = 0
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = TOP_K_ALL  # -1 or >= 1
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=2.0)] = 1.0
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    stop_regex: Annotated[tuple[StopRegex, ...], msgspec.Meta(max_length=MAX_STOPS)] = ()
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    json_schema: str | None = None
    strict_grammar: bool = False  # reject schemas that a grammar alone cannot enforce
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    choice: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_CHOICES)] = ()
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] = {}
    sampling_seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    custom_params: dict[str, str | int | float | bool | None] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Kind and text of the grammar that constrains the output, if any.

        The text of a choice is a JSON list.
        """
        for kind in ("json_schema", "regex", "ebnf", "structural_tag"):
            text = getattr(self, kind)
            if text:
                return kind, text
        return ("choice", json.dumps(self.choice)) if self.choice else None


class Fault(NamedTuple):
    """An invalid sampling parameter: the field, the place in it, and the expected value."""

    name: str
    place: str
    text: str


_floats_of = attrgetter(*_FLOATS)
_grammars_of = attrgetter(*GRAMMARS)


def fault_of(sampling: SamplingParams) -> Fault | None:
    """The first fault that types do not catch and that needs no model to find."""
    return next(_faults(sampling), None)


def _faults(sampling: SamplingParams) -> Iterator[Fault]:
    if not all(map(math.isfinite, _floats_of(sampling))):
        for name in _FLOATS:
            if not math.isfinite(getattr(sampling, name)):
                yield Fault(name, "", "expected a finite number")
    if sampling.top_k == 0:
        yield Fault("top_k", "", "expected -1 (all) or at least 1")
    limit = sampling.max_new_tokens
    if limit is not None and sampling.min_new_tokens > limit:
        text = f"{sampling.min_new_tokens} is more than the {limit} tokens of the answer"
        yield Fault("min_new_tokens", "", text)
    if sum(map(bool, _grammars_of(sampling))) > 1:
        given = [name for name in GRAMMARS if getattr(sampling, name)]
        yield Fault(given[1], "", f"excludes {given[0]}: one grammar constrains an output")
    for token, bias in sampling.logit_bias.items():
        place = f".{token[:20]}"
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            yield Fault("logit_bias", place, "the key must be a token id")
        if not abs(bias) <= MAX_LOGIT_BIAS_VALUE:
            yield Fault("logit_bias", place, "expected a number from -100 to 100")
