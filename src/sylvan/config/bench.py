"""The configuration trees of measurements (`sylvan bench ...`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sylvan.config.tree import Config, Section
from sylvan.config.values import Count, Natural, Seconds, Secret, Tokens

Positive = Annotated[float, msgspec.Meta(gt=0)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]


class TargetConfig(Section, frozen=True):
    """The server under load."""

    url: str = "http://127.0.0.1:30000"
    """Address of the server, with or without `/v1`."""
    api: Literal["native", "completions", "chat", "embeddings"] = "native"
    """API of the requests: `/generate`, `/v1/completions`, `/v1/chat/completions` or
    `/v1/embeddings`. All but the first work with any server of the OpenAI API."""
    model: str | None = None
    """Model name in requests; default: the first model that the server lists."""
    tokenizer: str | None = None
    """Directory of the tokenizer that generates and counts prompts; default: the server's, if it is
    on this machine."""
    api_key: Secret | None = None
    """Key for the server; default: the variable OPENAI_API_KEY or API_KEY."""
    headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Headers of every request: `x-tenant=a,x-class=b`."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters used in requests."""
    adapter_choice: Literal["uniform", "distinct", "zipf"] = "uniform"
    """Which adapter a request uses: a random one, each in turn, or by Zipf's law."""
    adapter_zipf: Annotated[float, msgspec.Meta(gt=1)] = 1.5
    """Exponent of Zipf's law for `target.adapter_choice` `zipf`."""
    ready_s: Seconds = 60.0
    """Seconds to wait for the server to start; 0 does not wait."""
    timeout_s: Positive = 6 * 3600.0
    """Requests that take longer count as failed."""


class DataConfig(Section, frozen=True):
    """The prompts."""

    dataset: Literal["random", "shared-prefix", "image", "sharegpt", "custom", "trace"] = "random"
    """Where prompts come from; `image` needs `target.api` `chat` and a multimodal model."""
    path: str | None = None
    """File of the data set; `sharegpt`, `custom` and `trace` need one."""
    requests: Count = 1000
    """Number of requests; each turn of a conversation counts."""
    offset: Natural = 0
    """Entries of the file to skip."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 42
    """Seed for all random choices."""
    input_tokens: Tokens = 1024
    """`random`, `image`: most tokens of a prompt, without images."""
    output_tokens: Tokens | None = None
    """Tokens to generate; `random`, `image`: the maximum, 1024 by default. Default for others: as
    in the data set, or 256."""
    range_ratio: Ratio = 0.0
    """`random`, `shared-prefix`, `image`: lengths are drawn between this share of the maximum and
    the maximum."""
    context_tokens: Tokens | None = None
    """`sharegpt`, `custom`, `trace`: skip entries with more tokens in prompt and answer."""
    groups: Count = 64
    """`shared-prefix`: number of system prompts."""
    prompts_per_group: Count = 16
    """`shared-prefix`: number of conversations per system prompt."""
    system_tokens: Tokens = 2048
    """`shared-prefix`: length of a system prompt."""
    question_tokens: Tokens = 128
    """`shared-prefix`: length of a question."""
    turns: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """`random`, `shared-prefix`: turns of a conversation; each turn repeats the previous ones."""
    images: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """`image`: number of different images per request."""
    image_size: str = "1080p"
    """`image`: `4k`, `1080p`, `720p`, `360p`, or `HEIGHTxWIDTH` in pixels."""
    image_format: Literal["jpeg", "png"] = "jpeg"
    """`image`: compression format."""
    image_content: Literal["random", "blank"] = "random"
    """`image`: noise, which compresses worst, or a single colour."""
    ordered: bool = False
    """`shared-prefix`: send group after group; default: mixed."""
    suffix: str = ""
    """Text appended to each prompt."""


class LoadConfig(Section, frozen=True):
    """The load: when requests are sent."""

    rate: Positive | None = None
    """Conversations started per second; `none`: as fast as `load.concurrency` allows."""
    burstiness: Positive = 1.0
    """Shape of the gaps with `load.rate`: 1 is a Poisson process, smaller values are burstier,
    larger ones more regular."""
    concurrency: Count | None = None
    """Most requests at a time; `none`: no limit."""
    sweep: tuple[str, ...] = ()
    """Loads to run in turn: `1,8,32` as `load.concurrency`, or `2/s,4/s` as `load.rate`."""
    timestamps: bool = False
    """`trace`: send requests at the times of the trace; `load.rate` is ignored."""
    slowdown: Positive = 1.0
    """`load.timestamps`: factor by which gaps are stretched."""
    warmup: Natural = 1
    """Requests sent one after the other before the measurement."""
    flush_cache: bool = False
    """Empty the server's prefix cache before the measurement."""
    max_seconds: Positive = 3600.0
    """Longest time of the measurement; unfinished requests are cancelled and count as failed."""


class AnswerConfig(Section, frozen=True):
    """How answers are generated."""

    temperature: Seconds = 0.0
    """Sampling temperature."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Top-p (nucleus) sampling."""
    ignore_eos: bool = True
    """Generate exactly the requested number of tokens, ignoring the end of text."""
    stream: bool = True
    """Stream answers; without streaming there is no time to the first token."""
    logprobs: bool = False
    """Request log probabilities of output tokens."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    """Request the log probabilities of this many most likely tokens."""
    extra_body: str | None = None
    """JSON object with further fields for each request."""


class ResultConfig(Section, frozen=True):
    """The results of the measurement."""

    file: str | None = None
    """JSONL file to which each run appends a line."""
    details: bool = False
    """Write the times, lengths, texts and errors of each request to `result.file`."""
    html: str | None = None
    """File for an HTML report with charts."""
    tag: str | None = None
    """Name of the run in the file and report."""
    goodput: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Latency targets in milliseconds, for goodput: `ttft=500,tpot=50,e2e=10000`."""


class BenchConfig(Section, frozen=True):
    """One load test."""

    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    load: LoadConfig = LoadConfig()
    answer: AnswerConfig = AnswerConfig()
    result: ResultConfig = ResultConfig()


class OfflineConfig(Config, frozen=True):
    """An engine in this process, and its load test."""

    data: DataConfig = DataConfig()
    load: LoadConfig = LoadConfig()
    answer: AnswerConfig = AnswerConfig()
    result: ResultConfig = ResultConfig()


LoadTest = BenchConfig | OfflineConfig


class BatchConfig(Section, frozen=True):
    """Batches whose steps are timed."""

    sizes: tuple[Count, ...] = (1,)
    """Batch sizes to measure: `1,8,32`."""
    input_tokens: tuple[Count, ...] = (1024,)
    """Prompt lengths to measure."""
    output_tokens: tuple[Count, ...] = (16,)
    """Output lengths to measure."""
    repeats: Count = 3
    """Repetitions of each measurement; figures are medians."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 42
    """Seed of the prompts, which are random token ids."""
    file: str | None = None
    """JSONL file to which each measurement appends a line."""
    tag: str | None = None
    """Name of the run in the file."""


class OneBatchConfig(Config, frozen=True):
    """A model, and the batches whose steps are timed."""

    batch: BatchConfig = BatchConfig()
