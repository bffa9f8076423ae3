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
    """API that requests use: `/generate`, `/v1/completions`, `/v1/chat/completions` or
    `/v1/embeddings`. All but the first work with any server of the OpenAI API."""
    model: str | None = None
    """Model that requests name; default: the first one that the server lists."""
    tokenizer: str | None = None
    """Directory of the tokenizer that makes and counts prompts; default: the one that the server
    names, if it is on this machine."""
    api_key: Secret | None = None
    """Key of the server; default: the variable OPENAI_API_KEY or API_KEY."""
    headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Headers of every request: `x-tenant=a,x-class=b`."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that requests name."""
    adapter_choice: Literal["uniform", "distinct", "zipf"] = "uniform"
    """Which adapter a request names: any at random, each in turn, or by Zipf's law."""
    adapter_zipf: Annotated[float, msgspec.Meta(gt=1)] = 1.5
    """Exponent of Zipf's law for `target.adapter_choice` `zipf`."""
    ready_s: Seconds = 60.0
    """How long to wait for the server; 0 does not wait."""
    timeout_s: Positive = 6 * 3600.0
    """A request that takes longer counts as failed."""


class DataConfig(Section, frozen=True):
    """What is asked."""

    dataset: Literal["random", "shared-prefix", "image", "sharegpt", "custom", "trace"] = "random"
    """Where prompts come from; `image` is for `target.api` `chat` and models that see."""
    path: str | None = None
    """File of the data set; `sharegpt`, `custom` and `trace` need one."""
    requests: Count = 1000
    """Number of requests; conversations of several turns count each turn."""
    offset: Natural = 0
    """Entries of the file to skip."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 42
    """Seed of everything that is drawn."""
    input_tokens: Tokens = 1024
    """`random`, `image`: most tokens of a prompt, pictures aside."""
    output_tokens: Tokens | None = None
    """Tokens to generate; `random`, `image`: the most, 1024 by default. Default for others: as in
    the data set, or 256."""
    range_ratio: Ratio = 0.0
    """`random`, `shared-prefix`, `image`: lengths are drawn between this share of the most and the
    most."""
    context_tokens: Tokens | None = None
    """`sharegpt`, `custom`, `trace`: entries whose prompt and answer are longer are left out."""
    groups: Count = 64
    """`shared-prefix`: number of system prompts."""
    prompts_per_group: Count = 16
    """`shared-prefix`: conversations that share each of them."""
    system_tokens: Tokens = 2048
    """`shared-prefix`: length of a system prompt."""
    question_tokens: Tokens = 128
    """`shared-prefix`: length of a question."""
    turns: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """`random`, `shared-prefix`: questions of a conversation; each turn repeats what was said."""
    images: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """`image`: pictures of a request; each is another one."""
    image_size: str = "1080p"
    """`image`: `4k`, `1080p`, `720p`, `360p`, or `HEIGHTxWIDTH` in pixels."""
    image_format: Literal["jpeg", "png"] = "jpeg"
    """`image`: how pictures are compressed."""
    image_content: Literal["random", "blank"] = "random"
    """`image`: noise, which is as large as pictures get, or one colour."""
    ordered: bool = False
    """`shared-prefix`: one group after the other; default: mixed."""
    suffix: str = ""
    """Text after each prompt."""


class LoadConfig(Section, frozen=True):
    """When it is asked."""

    rate: Positive | None = None
    """Conversations that begin in a second; `none`: as fast as `load.concurrency` lets them."""
    burstiness: Positive = 1.0
    """Shape of the gaps with `load.rate`: 1 is a Poisson process, less comes in bursts, more is
    steadier."""
    concurrency: Count | None = None
    """Most requests at a time; `none`: no limit."""
    sweep: tuple[str, ...] = ()
    """Run once for each of these: `1,8,32` as `load.concurrency`, or `2/s,4/s` as `load.rate`."""
    timestamps: bool = False
    """`trace`: requests are sent at the times of the trace; `load.rate` does not count."""
    slowdown: Positive = 1.0
    """`load.timestamps`: gaps are so many times longer."""
    warmup: Natural = 1
    """Requests before the measurement, one after the other."""
    flush_cache: bool = False
    """Empty the server's prefix cache before the measurement."""
    max_seconds: Positive = 3600.0
    """When the measurement ends; requests that run then are cancelled and counted as failed."""


class AnswerConfig(Section, frozen=True):
    """How answers are generated."""

    temperature: Seconds = 0.0
    """Sampling temperature."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Nucleus of sampling."""
    ignore_eos: bool = True
    """Generate as many tokens as asked for, whatever the model says."""
    stream: bool = True
    """Ask for streams; without them there is no time to the first token."""
    logprobs: bool = False
    """Ask for log probabilities of output tokens."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    """Ask for those of so many likely tokens besides."""
    extra_body: str | None = None
    """JSON object of further fields of each request."""


class ResultConfig(Section, frozen=True):
    """What becomes of the measurement."""

    file: str | None = None
    """JSONL file to which a line is added for each run."""
    details: bool = False
    """Write the times, lengths, texts and errors of each request to `result.file`."""
    html: str | None = None
    """File for a report with charts."""
    tag: str | None = None
    """Name of the run in the file and report."""
    goodput: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Bounds in milliseconds that a good request keeps: `ttft=500,tpot=50,e2e=10000`."""


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
    """Requests of a batch; each number is measured: `1,8,32`."""
    input_tokens: tuple[Count, ...] = (1024,)
    """Tokens of each prompt; each number is measured."""
    output_tokens: tuple[Count, ...] = (16,)
    """Tokens to generate; each number is measured."""
    repeats: Count = 3
    """Times that each is measured; figures are medians."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 42
    """Seed of the prompts, which are random token ids."""
    file: str | None = None
    """JSONL file to which a line is added for each."""
    tag: str | None = None
    """Name of the run in the file."""


class OneBatchConfig(Config, frozen=True):
    """A model, and the batches whose steps are timed."""

    batch: BatchConfig = BatchConfig()
