"""Bodies of the native routes, and the split of `/generate` bodies into single prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field, RootModel

from sylvan.api.media import native_media
from sylvan.api.request_fields import MAX_NAME_CHARS, Name, OptionFields, Rid
from sylvan.api.sampling import read_sampling
from sylvan.api.validation import ClosedModel, WireModel
from sylvan.media.source import MediaSource
from sylvan.protocol.errors import RequestError
from sylvan.protocol.media import MediaKind
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams

MAX_LOGPROB_IDS = 1024

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = list[TokenId]
ThinkingBudget = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _sampling_schema() -> dict[str, Any]:
    schema = msgspec.json.schema_components([SamplingParams])[1]["SamplingParams"]
    for name in ("stop", "stop_regex"):  # a string counts as a list of one
        listed = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [{"type": "string"}, listed]}
    for name, field in schema["properties"].items():  # null means "not set"
        schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
    return schema


_SAMPLING_SCHEMA = _sampling_schema()


class OpenSessionBody(WireModel):
    """Options of a new session."""

    capacity_of_str_len: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Expected length of its texts; required, and echoed."""
    session_id: Rid | None = None
    """Its ID; generated if not given."""
    streaming: bool | None = None
    """Strictly sequential turns, each continuing the last; only the last turn is kept."""
    timeout: Annotated[float, Field(gt=0, le=31 * 86400)] | None = None
    """Seconds of inactivity after which it is closed."""


class CloseSessionBody(WireModel):
    """The session to close."""

    session_id: Rid | None = None
    """Its ID."""


class SessionParams(ClosedModel):
    """Where a prompt continues in an open session."""

    id: Rid | None = None
    """ID of the session."""
    rid: Rid | None = None
    """ID of the earlier request whose prompt and output come first; null: start over."""
    offset: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    """Keep only this many of their tokens, counted from the end if negative; 0 or null: all."""
    replace: bool | None = None
    """Drop what came after `rid`; without `rid`, drop everything."""
    drop_previous_output: bool | None = None
    """Leave out the output of `rid`."""

    @property
    def without_effect(self) -> Collection[str]:
        """Without an earlier request there is no history to change."""
        return ("offset", "drop_previous_output") if self.rid is None else ()


MediaValue = str | dict[str, Any] | None
Media = MediaValue | list[MediaValue | list[MediaValue]]
"""An item, a list of items, or in a batch one of these per prompt."""


class GenerateBody(OptionFields):
    """One prompt, or a list of prompts."""

    text: str | list[str] | None = None
    """The prompt."""
    input_ids: TokenIds | list[TokenIds] | None = None
    """The prompt as token IDs; ignored if `text` is given."""
    image_data: Media = None
    """Images of the prompt, in the order of their placeholders: URLs, data URLs or base64."""
    video_data: Media = None
    """Videos, in the same forms."""
    audio_data: Media = None
    """Audio, in the same forms."""
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = Field(
        None,
        json_schema_extra={
            "anyOf": [
                _SAMPLING_SCHEMA,
                {"type": "array", "items": _SAMPLING_SCHEMA},
                {"type": "null"},
            ]
        },
    )
    """Sampling parameters; a list has one object per prompt."""
    rid: Rid | list[Rid] | None = None
    """Request ID; in a batch a string becomes `<rid>_<i>`."""
    stream: bool | None = None
    """Stream the answer as server-sent events."""
    background: bool | None = None
    """Continue if the client disconnects."""
    return_logprob: bool | list[bool] | None = None
    """Return log probabilities."""
    logprob_start_len: int | list[int] | None = None
    """First prompt position whose log probability is returned; -1: output only."""
    top_logprobs_num: int | list[int] | None = None
    """Most likely alternatives returned per position."""
    token_ids_logprob: TokenIds | list[TokenIds | None] | None = None
    """Token IDs whose log probability is returned at every position."""
    return_text_in_logprobs: bool | None = None
    """Return the text of tokens in log probabilities."""
    return_prompt_token_ids: bool | None = None
    """Return the token IDs of the prompt."""
    lora_path: Name | list[Name | None] | None = None
    """Name of the LoRA adapter."""
    extra_key: Name | list[Name | None] | None = None
    """Namespace of the prefix cache."""
    cache_salt: Name | list[Name | None] | None = None
    """Salt that isolates the prefix cache."""
    session_params: SessionParams | None = None
    """Continue an earlier request of a session; the prompt is only the new part."""
    session_id: Name | None = None
    """Identifies the caller; has no effect on the prompt."""
    require_reasoning: bool | None = None
    """The output starts inside reasoning; a grammar starts after its end."""
    max_thinking_tokens: ThinkingBudget | None = None
    """Tokens of reasoning after which it is forced to end; can be combined with a grammar."""

    @property
    def without_effect(self) -> Collection[str]:
        return ("session_id",) if self.text is None else ("session_id", "input_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a `/generate` body."""

    text: str | None
    input_ids: tuple[int, ...] | None
    sampling: SamplingParams
    rid: str | None
    logprobs: LogprobOptions | None
    lora: str | None
    cache_salt: str
    media: tuple[MediaSource, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestBodyLimits:
    """Limits of one body."""

    max_samples: int
    max_top_logprobs: int


def read_prompts(
    body: GenerateBody, defaults: Mapping[str, Any], limits: RequestBodyLimits
) -> tuple[list[Prompt], bool]:
    """Return the prompts of a body, and whether it is a batch.

    Raises:
        RequestError: A field is invalid; the message names it and its limit.
    """
    prompts, is_batch = _inputs(body, session=session_of(body) is not None)
    size = len(prompts)
    if size > limits.max_samples:
        field = "text" if body.text is not None else "input_ids"
        message = f"{field}: {size} prompts are more than limits.samples={limits.max_samples}."
        raise RequestError(message, param=field, setting="limits.samples")
    samplings = _samplings(body, size, is_batch, defaults)
    total = sum(s.n for s in samplings)
    if total > limits.max_samples:
        most = limits.max_samples
        message = f"sampling_params.n: {total} samples are more than limits.samples={most}."
        raise RequestError(message, param="sampling_params.n", setting="limits.samples")
    rids = _rids(body.rid, size, is_batch)
    logprobs = _logprobs(body, size, is_batch, limits)
    loras = _spread(body.lora_path, "lora_path", size, is_batch)
    keys = _spread(body.extra_key, "extra_key", size, is_batch)
    salts = _spread(body.cache_salt, "cache_salt", size, is_batch)
    media = _media(body, size, is_batch)
    return [
        Prompt(
            text=item if isinstance(item, str) else None,
            input_ids=None if isinstance(item, str) else tuple(item),
            sampling=samplings[i],
            rid=rids[i],
            logprobs=logprobs[i],
            lora=loras[i] or None,
            cache_salt=join_salt(keys[i], salts[i]),
            media=media[i],
        )
        for i, item in enumerate(prompts)
    ], is_batch


def _media(body: GenerateBody, size: int, is_batch: bool) -> list[tuple[MediaSource, ...]]:
    fields: Mapping[MediaKind, Media] = {
        "image": body.image_data,
        "video": body.video_data,
        "audio": body.audio_data,
    }
    each = [
        native_media(kind, given, f"{kind}_data", size, is_batch=is_batch)
        for kind, given in fields.items()
    ]
    return [tuple(item for kind in each for item in kind[i]) for i in range(size)]


def join_salt(extra_key: str | None, cache_salt: str | None) -> str:
    """Combine two salts such that different pairs yield different salts."""
    if not extra_key and not cache_salt:
        return ""
    return f"{len(extra_key or '')}:{extra_key or ''}{cache_salt or ''}"


def session_of(body: GenerateBody) -> SessionParams | None:
    """Return where the prompt continues in which session; None without a session.

    Raises:
        RequestError: No session is named, or two are.
    """
    params = body.session_params
    if params is None or not params.model_fields_set:
        return None
    if body.session_id is not None:
        message = "session_id and session_params exclude each other."
        raise RequestError(message, param="session_id")
    if params.id is None:
        raise RequestError("session_params.id must be given.", param="session_params.id")
    return params


def _inputs(body: GenerateBody, *, session: bool) -> tuple[list[str] | list[TokenIds], bool]:
    """Return the prompts, and whether they came as a list; in a session a prompt may be empty."""
    field = "text" if body.text is not None else "input_ids"
    value: Any = body.text if body.text is not None else body.input_ids
    if session and not value:
        return [[]], False
    if value is None:
        raise RequestError("One of text and input_ids must be given.", param="text")
    if not value:
        raise RequestError(f"{field} must not be empty.", param=field)
    if isinstance(value, str) or isinstance(value[0], int):
        return [value], False
    for i, item in enumerate(value):
        if not item:
            raise RequestError(f"{field}[{i}] must not be empty.", param=f"{field}[{i}]")
    return value, True


def _spread(value: Any, field: str, size: int, is_batch: bool) -> list[Any]:
    """Expand a scalar to all prompts, or return one value per prompt."""
    if not isinstance(value, list):
        return [value] * size
    if not is_batch:
        raise RequestError(f"{field}: a list needs a list of prompts.", param=field)
    if len(value) != size:
        message = f"{field} has {len(value)} items for {size} prompts."
        raise RequestError(message, param=field)
    return value


def _samplings(
    body: GenerateBody, size: int, is_batch: bool, defaults: Mapping[str, Any]
) -> list[SamplingParams]:
    given = body.sampling_params
    if not isinstance(given, list):
        return [read_sampling(given or {}, defaults)] * size
    spread = _spread(given, "sampling_params", size, is_batch)
    read = [read_sampling(p, defaults, f"sampling_params[{i}]") for i, p in enumerate(spread)]
    if len({s.n for s in read}) > 1:
        message = "sampling_params: all prompts of a batch must have the same n."
        raise RequestError(message, param="sampling_params")
    return read


def _rids(given: str | list[str] | None, size: int, is_batch: bool) -> list[str | None]:
    if isinstance(given, str):
        return [f"{given}_{i}" for i in range(size)] if is_batch else [given]
    rids = _spread(given, "rid", size, is_batch)
    if given is not None and len(set(rids)) < size:
        raise RequestError("rid: the names of a batch must differ.", param="rid")
    return rids


def _logprobs(
    body: GenerateBody, size: int, is_batch: bool, limits: RequestBodyLimits
) -> list[LogprobOptions | None]:
    wanted = _spread(body.return_logprob, "return_logprob", size, is_batch)
    starts = _spread(body.logprob_start_len, "logprob_start_len", size, is_batch)
    tops = _spread(body.top_logprobs_num, "top_logprobs_num", size, is_batch)
    for start in starts:
        if start is not None and start < -1:
            message = f"logprob_start_len: expected at least -1, not {start}."
            raise RequestError(message, param="logprob_start_len")
    for top in tops:
        if top is not None and not 0 <= top <= limits.max_top_logprobs:
            message = f"top_logprobs_num: expected 0 to {limits.max_top_logprobs}, not {top}."
            raise RequestError(message, param="top_logprobs_num")
    ids = _logprob_ids(body, size, is_batch)
    return [
        LogprobOptions(
            start=None if starts[i] in (None, -1) else starts[i],
            top=tops[i] or 0,
            token_ids=ids[i],
        )
        if wanted[i]
        else None
        for i in range(size)
    ]


def _logprob_ids(body: GenerateBody, size: int, is_batch: bool) -> list[tuple[int, ...]]:
    value = body.token_ids_logprob
    if value is None or not value or isinstance(value[0], int):
        spread: list[Any] = [value] * size
    else:
        spread = _spread(value, "token_ids_logprob", size, is_batch)
    if any(len(ids or ()) > MAX_LOGPROB_IDS for ids in spread):
        message = f"token_ids_logprob: more than {MAX_LOGPROB_IDS} ids."
        raise RequestError(message, param="token_ids_logprob")
    return [tuple(ids or ()) for ids in spread]


class AbortBody(WireModel):
    """The requests to abort."""

    rid: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = ""
    """ID of one request."""
    abort_all: bool | None = False
    """Abort all requests."""


class PauseBody(WireModel):
    """How to pause scheduling."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """`abort` aborts all requests, `retract` frees their KV, `in_place` keeps it."""


class RoleBody(WireModel):
    """The new disaggregation role."""

    new_role: Literal["prefill", "decode"]
    """`prefill` or `decode`."""
    prepare_only: bool = False
    """Only report whether the switch is possible."""
    decode_cuda_graph_bs: list[int] | None = None
    """Accepted; has no effect here."""
    decode_cuda_graph_memory_gb: float | None = None
    """Accepted; has no effect here."""

    @property
    def without_effect(self) -> Collection[str]:
        return ("decode_cuda_graph_bs", "decode_cuda_graph_memory_gb")


class ContinueBody(WireModel):
    """Resume scheduling."""

    torch_empty_cache: bool | None = True
    """Accepted; has no effect here."""

    @property
    def without_effect(self) -> Collection[str]:
        return ("torch_empty_cache",)


class FlushQuery(WireModel):
    """Query of `/flush_cache`."""

    timeout: Annotated[float, Field(ge=0, le=600)] = 0.0
    """Seconds to wait until no request runs."""


class LoadsQuery(WireModel):
    """Query of `/v1/loads`."""

    include: str = "all"
    """Comma-separated sections: core, memory, queues, lora, spec, disagg, all."""
    format: Literal["json", "prometheus"] = "json"
    """Format of the answer."""
    dp_rank: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Only this replica."""


class RecentQuery(WireModel):
    """Query of `/requests`."""

    limit: Annotated[int, Field(ge=1, le=256)] = 100
    """Largest number of requests to return."""


class ControlReplyBody(BaseModel):
    """Result of a control command."""

    message: str
    status: Literal["ok"] = "ok"


class GenerateReply(BaseModel):
    """One sample."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | None = None
    prompt_token_ids: list[int] | None = None


class GenerateReplies(RootModel[GenerateReply | list[GenerateReply]]):
    """The answer of `/generate`: an object for one sample, else a list, prompt by prompt."""
