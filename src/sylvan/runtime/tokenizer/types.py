"""Inputs and outputs of the TokenizerManager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from sylvan.media.source import MediaSource
from sylvan.protocol.errors import CapacityError, RequestError, SylvanError
from sylvan.protocol.media import MEDIA_KINDS, MediaKind
from sylvan.protocol.messages import Finish, Timing, TokenLogprobs, Usage
from sylvan.protocol.requests import (
    Bootstrap,
    LogprobOptions,
    RequestOptions,
    ThinkingOptions,
    VectorForm,
)
from sylvan.protocol.sampling import SamplingParams

State = Literal["starting", "up", "draining", "recovering", "lost", "stopped"]
"""`recovering`: processes are restarting, requests wait; `lost`: restarts were given up."""

ReplicaState = Literal["starting", "up", "recovering", "lost"]
"""The same for one replica: its scheduler and its detokenizer."""

Task = Literal["generate", "embed", "classify", "both"]
"""Task of a model; `both` generates and embeds."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a request.

    Attributes:
        name: Name of the call: `POST /v1/chat/completions`, or a gRPC method.
        received_s: Arrival time on the monotonic clock; 0: unknown.
        trace: Headers of the caller's trace (W3C): `traceparent`, `tracestate`.
        labels: Custom metric labels, as far as the operator allows them.
        peer: Address of the client; empty: unknown.
    """

    name: str = ""
    received_s: float = 0.0
    trace: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    labels: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    peer: str = ""


class EmbedInput(msgspec.Struct, frozen=True, kw_only=True):
    """One text, or a pair of texts, to embed.

    Exactly one of `text`, `input_ids` and `chunks` is given; `pair` goes with `text`, and the model
    reads it as a second segment. `chunks` are the parts of one text, with a vector for each: the
    mean of its tokens, which have seen the others (late chunking). `media` are the items of
    `input_ids`, in the order of their placeholders. Text never yields control tokens. `form` is
    what is made of the text; None: what the model usually makes. `dimensions` truncates vectors,
    for models trained for that; `truncate` truncates a text that is too long, at its end.
    `internal` requests are our own, such as health probes; they are not counted in metrics. To the
    last `hidden` tokens no token attends.
    """

    text: str | None = None
    pair: str | None = None
    input_ids: Sequence[int] | None = None
    chunks: tuple[str, ...] = ()
    media: tuple[MediaSource, ...] = ()
    form: VectorForm | None = None
    dimensions: int | None = None
    truncate: bool = False
    normalize: bool = True
    rid: str | None = None
    lora: str | None = None
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    internal: bool = False
    origin: Origin | None = None
    hidden: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Result of an `EmbedInput`, in one of the forms of `VectorForm`."""

    rid: str
    values: np.ndarray
    input_ids: tuple[int, ...]
    usage: Usage
    finish: Finish
    timing: Timing | None


class GenerateInput(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue `sampling.n` times.

    Exactly one of `text` and `input_ids` is given. `text` is tokenised as a client's text; with
    `trusted`, control tokens in it are recognised. `rid` is the request ID for `abort`; it must be
    unique among the tenant's live requests. `options` go to the scheduler. With `stream` False
    each sample yields one delta, at its end; else one whenever `sampling.stream_interval` tokens (1
    if None) are available and the reader is ready. `internal` requests are our own, such as health
    probes; they are not counted in metrics. `default_seed` is used if neither `sampling` nor the
    operator sets one. `past` is output that another server generated for this request, which is
    continued; the first delta is then empty, and confirms the admission. `bootstraps`, one per
    sample, are rendezvous with another server under disaggregation; none: no disaggregation.
    `media` are the items of the prompt, in the order of their placeholders. `align`: see
    `GenerateRequest`.
    """

    text: str | None = None
    input_ids: Sequence[int] | None = None
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    rid: str | None = None
    stream: bool = True
    logprobs: LogprobOptions | None = None
    lora: str | None = None
    tenant: str = ""
    cache_salt: str = ""
    options: RequestOptions = msgspec.field(default_factory=RequestOptions)
    add_special_tokens: bool = True
    trusted: bool = True
    thinking: ThinkingOptions | None = None
    internal: bool = False
    default_seed: int | None = None
    past: tuple[SampleDelta, ...] | None = None
    bootstraps: tuple[Bootstrap, ...] = ()
    media: tuple[MediaSource, ...] = ()
    origin: Origin | None = None
    align: int = 0


class SampleDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one sample.

    Attributes:
        rid: Request ID, the same for all its samples.
        index: Index of the sample, from 0.
        text: New text.
        token_ids: New IDs, including those of a stop.
        logprobs: Log probabilities of `token_ids`, if requested.
        prompt_logprobs: Once per sample, with its first delta, if requested.
        usage: Token counts so far.
        finish: Finish reason; None before its last delta.
        timing: With the finish; seconds of the monotonic clock.
        embedding: Result of an embedding request, instead of text; float32.
        weight_versions: Version labels of the weights that generated the sample, in order.
    """

    rid: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    usage: Usage = Usage()
    finish: Finish | None = None
    timing: Timing | None = None
    embedding: np.ndarray | None = None
    weight_versions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelInfo:
    """Properties and limits of the served model.

    `context_len` limits prompt plus output; `max_total_tokens` is the KV memory, in tokens;
    `max_request_tokens` the smaller of the two. `vector_size` is the length of an embedding, or the
    number of labels of a classifier; `forms` are what it makes of a text, the usual one first.
    `decoder_prompt` are the ids that a decoder starts with whose encoder reads the prompt, of at
    most `encoder_len` tokens; empty: the model has no such encoder. Texts to embed are padded to
    `padded_len` tokens (0: they are not).
    `extra` is what else the scheduler reported.
    """

    model_path: str
    served_name: str
    context_len: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    max_total_tokens: int = 0
    page_size: int = 1
    max_running_reqs: int = 0
    architecture: str = ""
    model_type: str = ""
    task: Task = "generate"
    vector_size: int = 0
    forms: tuple[VectorForm, ...] = ("text",)
    decoder_prompt: tuple[int, ...] = ()
    encoder_len: int = 0
    padded_len: int = 0
    extra: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def media_tokens(self) -> dict[MediaKind, int]:
        """Placeholder tokens, by media kind."""
        found: dict[MediaKind, int] = {}
        for kind in MEDIA_KINDS:
            token = self.extra.get(f"{kind}_token_id")
            if isinstance(token, int):
                found[kind] = token
        return found

    @property
    def is_generation(self) -> bool:
        """Whether it generates."""
        return self.task in ("generate", "both")

    @property
    def embeds(self) -> bool:
        """Whether it computes embeddings."""
        return self.task in ("embed", "both")

    @property
    def max_request_tokens(self) -> int:
        """Largest number of tokens, prompt plus output, of one request."""
        return min(self.context_len, self.max_total_tokens or self.context_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Limits and defaults of the API process.

    `max_live_samples` limits what is kept for replay, `max_unfinished` the samples that a
    replica's scheduler runs and queues (None: only it knows), `max_parameter_bytes` the sampling
    parameters of all samples of a request, `max_logprobs` their log probabilities; `seed` is for
    requests without one.
    """

    max_live_samples: int = 16384
    max_unfinished: int | None = None
    max_parameter_bytes: int = 64 << 20
    max_logprobs: int = 32 << 20
    stream_interval: int = 1
    seed: int | None = None


def error_of(finish: Finish | None) -> SylvanError | None:
    """Return the error of a finish; None for normal ends and aborts by the client."""
    if finish is None or finish.type != "abort" or finish.status is None:
        return None
    if finish.status in (429, 503):
        return CapacityError(finish.message, status=finish.status)
    return RequestError(finish.message, param=finish.param, status=finish.status)
