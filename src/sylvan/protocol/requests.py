"""Requests after tokenisation; immutable, and identical in every process."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from sylvan.protocol.media import MediaItem
from sylvan.protocol.sampling import SamplingParams


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which log probabilities to return.

    `start` is the first prompt position whose log probability is wanted; None for outputs only.
    `top` is the number of most likely alternatives per position. `token_ids` are ids whose log
    probability is wanted at every position.
    """

    start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()


class ThinkingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to find thinking in an output: a grammar starts after it, a budget ends it.

    `ends` are the markers that end thinking, as token ids; the first is forced after `budget`
    tokens of thinking. With `inside`, the prompt ends within thinking; otherwise the output thinks
    if it starts with one of `starts`. One of `headers` may precede the answer, at the start of the
    output and after thinking; a grammar starts after it.
    """

    ends: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...] = ()
    headers: tuple[tuple[int, ...], ...] = ()
    inside: bool = True
    budget: int | None = None


class Bootstrap(msgspec.Struct, frozen=True, array_like=True):
    """Rendezvous of a prefill and a decode server for a request: a room at the prefill server.

    `role` is this server's role in the request; None: the role it was started with.
    """

    host: str
    port: int
    room: int
    role: Literal["prefill", "decode"] | None = None


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that pass unchanged from the request body to the scheduler.

    `deadline_s` counts from arrival; `ttft_ms` and `tpot_ms` are targets for the first token and
    for each later one; a request that misses them is still served.
    `decoder_prompt` is what the answer of an encoder-decoder model begins with, after its start
    token: a text or token ids, such as the target language of a translation.
    `denoising_steps` are the most passes in which a diffusion model fills a block, `confidence` is
    the probability from which on it keeps a token at once; None: the server decides.
    """

    priority: int = 0  # larger is more urgent
    deadline_s: float | None = None  # after which the request is aborted
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    decoder_prompt: str | tuple[int, ...] | None = None
    denoising_steps: int | None = None
    confidence: float | None = None


class GenerateRequest(RequestOptions, frozen=True, kw_only=True, tag="generate"):
    """Generate one continuation of `input_ids`.

    `n` samples are `n` requests that differ in `rid` and `sample`. `output_ids` is not empty if a
    request is replayed after a restart: the client already has those tokens; they count against
    `max_new_tokens`, and are continued, never repeated.

    `sampling.max_new_tokens` and `sampling.sampling_seed` are never None here. `interval` None
    means that no reader waits for single tokens: they are sent together at the end, and
    occasionally before, to limit recomputation after a process is lost.

    With `align` the first output has, as `embedding`, what each prompt token attends to among the
    first `align` vectors of the prompt's audio: float32 (prompt_len, align), for times of words.
    """

    rid: str
    input_ids: np.ndarray  # int32 (prompt_len,)
    output_ids: np.ndarray  # int32
    sampling: SamplingParams
    sample: int = 0  # index among n; part of the key of the random numbers
    eos_ids: tuple[int, ...] = ()  # empty with ignore_eos
    logprobs: LogprobOptions | None = None
    lora: str | None = None  # id of the adapter: its name and its contents
    tenant: str = ""
    cache_salt: str = ""  # isolates the prefix cache; derived from tenant, extra_key, cache_salt
    shared_tokens: int = 0  # leading tokens that the salt does not isolate
    thinking: ThinkingOptions | None = None
    bootstrap: Bootstrap | None = None  # None: this server does everything
    media: tuple[MediaItem, ...] = ()  # in the order of the prompt
    interval: int | None = 1  # emit every `interval` tokens; the first is always emitted
    align: int = 0


VectorForm = Literal["text", "tokens", "weights", "steps", "item"]
"""Forms of the result of an `EmbedRequest`, float32.

`text`: one vector, or a number for each label. `tokens`: a vector of each token (ColBERT).
`weights`: a number for each token (BGE-M3's sparse head). `steps`: probabilities of the labels at
each token that ends a step (process reward models). `item`: the vector of its only item, made by an
encoder of its own (CLIP).
"""


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Compute vectors or numbers of `input_ids`, in one of the forms that the model makes."""

    rid: str
    input_ids: np.ndarray  # int32 (prompt_len,)
    token_types: np.ndarray | None = None  # int32 (prompt_len,): segment of each token, for pairs
    media: tuple[MediaItem, ...] = ()
    form: VectorForm = "text"
    spans: tuple[tuple[int, int], ...] = ()  # a vector for each instead: the mean of its tokens
    hidden: int = 0  # to so many of the last tokens no token attends
    dimensions: int | None = None
    normalize: bool = True
    lora: str | None = None  # id of the adapter: its name and its contents
    tenant: str = ""
    cache_salt: str = ""  # isolates the prefix cache; derived from tenant
    priority: int = 0
    deadline_s: float | None = None


Request = GenerateRequest | EmbedRequest
