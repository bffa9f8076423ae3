"""The table of request fields: each one's type, limits, and name in each API.

Bodies inherit the fields from here, and values pass through unchanged: `request_options` and
`sampling_values` get the list of fields from the structs of `sylvan.protocol`. A new attribute
of requests is a line in `RequestOptions` and one in `OptionFields`, a new sampling parameter one in
`SamplingParams` and one in `SamplingFields`, plus the code that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any

from pydantic import Field

from sylvan.api.validation import WireModel
from sylvan.protocol.requests import RequestOptions
from sylvan.protocol.sampling import MAX_LOGIT_BIAS, SamplingParams

MAX_NAME_CHARS = 256
MAX_DECODER_PROMPT = 65536

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Rid = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Timeout = Annotated[float, Field(gt=0, le=86400)]
Milliseconds = Annotated[float, Field(gt=0, le=86_400_000)]
DecoderPrompt = (
    Annotated[str, Field(max_length=MAX_DECODER_PROMPT)]
    | Annotated[list[int], Field(max_length=MAX_DECODER_PROMPT)]
)


class OptionFields(WireModel):
    """Request attributes that every API accepts."""

    priority: Priority | None = None
    """Larger values are more urgent."""
    timeout: Timeout | None = None
    """Seconds after which the request is aborted with status 503."""
    ttft_ms: Milliseconds | None = None
    """Target time to first token; requests that meet it count as goodput."""
    tpot_ms: Milliseconds | None = None
    """Target mean time between later tokens."""
    decoder_prompt: DecoderPrompt | None = None
    """Beginning of the answer of an encoder-decoder model: text or token IDs."""
    denoising_steps: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most forward passes in which a diffusion model fills a block."""
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    """Probability from which on a diffusion model keeps a token at once."""


class SamplingFields(WireModel):
    """Sampling parameters as fields of a body; `/generate` has them in `sampling_params`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    """Up to 32 strings that end the answer."""


class MoreSamplingFields(SamplingFields):
    """Sampling parameters of completions and chat completions."""

    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    """Maps token IDs to numbers from -100 to 100."""
    n: int | None = None
    """Number of choices."""
    seed: int | None = None
    """The same seed yields the same answer."""
    min_tokens: int | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: list[str] | None = None
    stop_token_ids: list[int | None] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    custom_params: dict[str, Any] | None = None


SPELLED: Mapping[str, str] = {
    "deadline_s": "timeout",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Body fields whose name differs from the engine's."""

_OPTIONS = {name: SPELLED.get(name, name) for name in RequestOptions.__struct_fields__}
_SAMPLING = {name: SPELLED.get(name, name) for name in SamplingParams.__struct_fields__}
_FEW = {n: theirs for n, theirs in _SAMPLING.items() if theirs in SamplingFields.model_fields}
_MORE = {n: theirs for n, theirs in _SAMPLING.items() if theirs in MoreSamplingFields.model_fields}
_options_of = attrgetter(*_OPTIONS.values())
_few_of, _more_of = attrgetter(*_FEW.values()), attrgetter(*_MORE.values())


def request_options(body: WireModel) -> RequestOptions:
    """Return the attributes that a body sets; defaults for the rest."""
    if not isinstance(body, OptionFields):  # nothing is generated for it
        return RequestOptions()
    found = zip(_OPTIONS, _options_of(body), strict=True)
    return RequestOptions(**{name: value for name, value in found if value is not None})


def sampling_values(body: SamplingFields) -> dict[str, Any]:
    """Return the sampling parameters that are fields of a body, by engine name; None: not set."""
    if isinstance(body, MoreSamplingFields):
        return dict(zip(_MORE, _more_of(body), strict=True))
    return dict(zip(_FEW, _few_of(body), strict=True))
