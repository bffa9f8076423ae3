"""The configuration tree. One section per component; a component is given only its own.

The text under each field is its documentation: `--help`, `docs/reference/config.md` and the web
pages are generated from it. A value `auto` is filled by `sylvan.config.resolve`, with a reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sylvan.config.limits import LimitsConfig
from sylvan.config.section import Section
from sylvan.config.values import (
    AnyTokens,
    Auto,
    Bytes,
    Count,
    Depth,
    Fraction,
    Natural,
    Port,
    Seconds,
    Secret,
    Tokens,
)

BUILT_IN_MODEL = "sapling"
DRAFTING_REQS = 8
"""Requests that may have all their guesses verified in the same step."""
DRAFT_HEADS = ("eagle", "eagle3", "medusa")
"""Algorithms of speculation that have a head beside the model."""
DRAFT_CONTEXTS = "draft_contexts.npz"
"""File by which `ngram` guesses what a model mostly says, in its directory or in one of its own."""
OWN_HEAD = "nextn"
"""The one whose head is part of the model's checkpoint."""


class CacheConfig(Section, frozen=True):
    """KV memory and prefix reuse."""

    page_size: Count | Auto = "auto"
    """Tokens per page of the KV cache; prefixes are shared in whole pages."""
    memory: Bytes | Fraction | Auto = "auto"
    """Size of the KV cache (`2GiB`), or the share of the device's memory that weights and KV cache
    may take together (`0.85`)."""
    max_tokens: Tokens | Auto = "auto"
    """Tokens that the KV cache holds; instead of `cache.memory`."""
    max_states: Count | Auto = "auto"
    """Slots of recurrent state, for models with layers that do not attend: the empty one, one for
    each running request, and the others for cached prefixes."""
    dtype: Literal["model", "fp8_e4m3", "int8"] = "model"
    """Type of keys and values: the model's, or one of 8 bits, which halves the memory and costs
    accuracy: floats (`fp8_e4m3`), or on the CPU `int8` with a scale for each token and head."""
    prefix: Literal["radix", "none"] = "radix"
    """Reuse the KV of shared prefixes through a radix tree, or not at all."""
    eviction: str = "lru"
    """Which cached prefixes go first when memory is short."""


class SchedulerConfig(Section, frozen=True):
    """What runs in one step."""

    policy: str = "auto"
    """Order of the waiting requests: `lpm` (longest cached prefix first, with ageing), `fcfs`,
    ..."""
    max_batch_tokens: Tokens | Auto = "auto"
    """Tokens computed in one step, over all requests."""
    chunk_tokens: AnyTokens | Auto = "auto"
    """Prompt tokens computed in one step, so that generation is not held up; 0 never splits a
    prompt."""
    max_running_reqs: Count | Auto = "auto"
    """Requests computed at the same time."""
    max_waiting_reqs: Count = 4096
    """Requests that may wait; one more is refused with status 503."""
    queue_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A request that waited longer is refused with status 503."""
    hang_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 300.0
    """A scheduler process without a sign of life for so long is ended, with its stacks printed, and
    replaced; must be longer than the longest step."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Plan the next step while the device computes the present one."""
    conservativeness: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    """Share of its `max_new_tokens` that a request is expected to use, relative to the built-in
    estimate; larger admits fewer requests and preempts less."""
    preempt_threshold: Natural | None = 10
    """How much higher the priority of a waiting request must be to push out a running one; `none`
    never does."""

    tenant_weights: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1e6)]] = {}
    """Shares of tenants under policy `vtc`: `name=2,other=1`; those not named weigh 1."""

    @property
    def inflight(self) -> int:
        """Steps under way at the same time; needs a resolved `overlap`."""
        assert self.overlap != "auto", "overlap is resolved before it is used"
        return 2 if self.overlap == "on" else 1


class ParallelConfig(Section, frozen=True):
    """Several processes that hold one model together."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Ranks of tensor parallelism: processes of which each holds a share of every layer, and of its
    KV, and computes with `threads` of its own."""
    backend: Literal["auto", "shared", "gloo"] = "auto"
    """How ranks tell each other numbers: through memory that they share, which needs the compiled
    kernels, or over gloo."""
    join_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Seconds within which all ranks must have come together at the start."""
    rank_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """A rank without a sign of life for so long is ended; all ranks start anew then, and requests
    go on."""


class ServerConfig(Section, frozen=True):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all."""
    port: Port = 30000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Listen on this unix socket instead of host and port."""
    grpc_port: Port | None = None
    """Serve the scheduler service over gRPC on this port of `server.host`, beside HTTP; 0 takes a
    free one. Needs the extra `grpc`."""
    api_key: Secret | None = None
    """Key that clients must send as `Authorization: Bearer KEY`."""
    api_key_file: str | None = None
    """JSON file of further keys, as SHA-256 hashes, with tenants and their budgets."""
    admin_api_key: Secret | None = None
    """Key for the administrative routes."""
    gateway_key: Secret | None = None
    """Key by which gateways are known, whose streams other servers can continue; without one, who
    may use the administrative routes is a gateway."""
    replicas: Count = 1
    """Servers of the model, each with a cache of its own, behind a gateway that this command starts
    with them. They share the cores and the memory of the CPU; GPUs are not shared."""
    register: tuple[str, ...] = ()
    """Gateways (`http://HOST:PORT`) that are told where this server is, and when it stops."""
    register_key: Secret | None = None
    """Key of an operator of these gateways."""
    register_url: str | None = None
    """Address by which they reach this server; default: where it listens."""
    root_path: str = ""
    """Path prefix under which a proxy shows this server."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose word on who calls counts (`X-Forwarded-For`,
    `X-Forwarded-Proto`); default: nobody's."""
    cors_origins: tuple[str, ...] = ()
    """Web origins that may call this server from a browser; `*` for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which clients may call this server, beside `localhost` and loopback addresses;
    `*` for all. Where it is empty, only servers on loopback without a key look at the name."""
    max_body_bytes: Bytes = 32 << 20
    """A larger request body is refused with status 413."""
    data_dir: str | None = None
    """Folder for uploaded files and batches; without one they live until the server stops."""
    response_store_size: Natural = 1024
    """Answers of `/v1/responses` that are kept to be read or continued; 0 keeps none."""
    drain_s: Seconds = 30.0
    """After SIGTERM, how long running requests may take to end."""
    access_log: bool = False
    """Log one line per HTTP request."""
    ssl_certfile: str | None = None
    """PEM file with the certificate chain; turns on TLS."""
    ssl_keyfile: str | None = None
    """PEM file with the private key of `server.ssl_certfile`."""
    ssl_keyfile_password: Secret | None = None
    """Password of the private key."""
    ssl_ca_certs: str | None = None
    """PEM file with authorities; clients must show a certificate that one of them signed."""


class TextConfig(Section, frozen=True):
    """From messages to tokens and back."""

    chat_template: str | None = None
    """File with a Jinja chat template; instead of the model's own."""
    tool_parser: str | None = "auto"
    """Format in which the model writes tool calls; `auto` goes by its template, `none` leaves them
    in the text."""
    reasoning_parser: str | None = "auto"
    """Format in which the model writes reasoning; `auto` goes by its template, `none` leaves it in
    the text."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Where sampling parameters that a request leaves out come from: the model's
    `generation_config.json`, or OpenAI's defaults."""
    incremental_stream: bool = False
    """`/generate` streams only the new text in each event, not all text so far."""
    stream_interval: Count = 1
    """Tokens per streamed event, unless the request says otherwise."""
    cache_report: bool = True
    """Usage names the prompt tokens that came from the cache."""
    stream_include_usage: bool = False
    """OpenAI streams end with their usage, also if the request does not ask for it."""
    preferred_sampling_params: dict[str, Any] = {}
    """Sampling parameters for what requests leave out: `temperature=0.7,top_p=0.9`, or JSON."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """Variables for chat templates that requests leave out: `enable_thinking=false`, or JSON."""
    shared_system_prompts: tuple[str, ...] = ()
    """Files with system prompts that are the same for all tenants: their part of the prefix cache
    is shared, although each tenant has a cache of its own."""
    allow_control_text: bool = False
    """Let text of users spell control tokens such as `<|im_end|>`. Unsafe: users can then forge
    messages of others."""


class EmbeddingConfig(Section, frozen=True):
    """Vectors of texts."""

    pooling: Literal["cls", "mean", "last", "max"] | None = None
    """How the vectors of a text's tokens become one; default: as the checkpoint says."""
    normalize: bool | None = None
    """Give vectors unit length; default: as the checkpoint says."""


class GrammarConfig(Section, frozen=True):
    """Structured output."""

    backend: str = "auto"
    """Library that compiles schemas, regexes and grammars; `none` refuses such requests."""
    jump_forward: bool = True
    """Append text that the grammar leaves no choice about without asking the model."""
    compile_timeout_s: Annotated[float, msgspec.Meta(gt=0.0)] = 10.0
    """Longest processor time that compiling one grammar may take, in seconds."""
    max_states: Annotated[int, msgspec.Meta(ge=100, le=10_000_000)] = 50_000
    """States of one grammar's automaton; made while outputs are written, 1 to 2 KiB each."""
    cache_dir: str | None = None
    """Directory in which compiled grammars outlive the process."""


class LoraConfig(Section, frozen=True):
    """Low-rank adapters, many in one batch. Present means on."""

    adapters: dict[str, str] = {}
    """Adapters to load at start: `name=DIR`, separated by commas."""
    pinned: tuple[str, ...] = ()
    """Names of those that keep their place in host memory and on the device."""
    max_per_batch: Count = 8
    """Different adapters in one batch: slots on the device. Requests without one need none."""
    max_rank: Count | Auto = "auto"
    """Largest rank of an adapter."""
    max_loaded: Count | None = None
    """Adapters kept in host memory; default: as many as `lora.memory` holds. Others are read again
    when they are asked for."""
    memory: Bytes | Auto = "auto"
    """Host memory for adapters."""
    eviction: Literal["lru", "fifo"] = "lru"
    """Which adapter leaves the device first: the one used longest ago, or the one that came
    first."""
    max_overtakes: Count = 32
    """Requests of other adapters that may start before one whose adapter waits for a slot; then a
    slot is freed for it."""
    allowed_dirs: tuple[str, ...] = ()
    """Directories from which adapters may be loaded while serving; default: any."""


class MediaConfig(Section, frozen=True):
    """Images, videos and sounds in requests, for models that take them."""

    workers: Count = 1
    """Processes that decode and prepare them. They start with the first request that needs one."""
    vector_bytes: Bytes = 256 << 20
    """Outputs of encoders that are kept of items without a request, for the next one with the
    same item."""
    fetch: bool = False
    """Fetch items from `http://` and `https://` addresses. Addresses of this machine and of private
    networks are never fetched from, unless `media.allowed_hosts` names them."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that items may be fetched from; default: any public one."""
    allowed_dirs: tuple[str, ...] = ()
    """Directories from which items may be read by path (`file://`); default: none."""
    item_bytes: Bytes = 64 << 20
    """Size of an item as it comes; larger ones are refused with status 413."""
    pixels: Count = 64 << 20
    """Width times height of an image."""
    frames: Count = 768
    """Frames of a video that are looked at, at most; the model's processor may look at fewer."""
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """Length of a video or sound."""
    items: Count = 64
    """Images, videos and sounds of one request."""
    fetch_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Seconds for fetching an item."""
    process_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Seconds for decoding and preparing an item; then its process is replaced."""


class SpeculativeConfig(Section, frozen=True):
    """Several tokens per step by drafting and verifying. Present means on."""

    algorithm: str
    """How tokens are guessed: `ngram` repeats what followed the same tokens before, in the prompt
    or in the output, and knows what the model mostly says if `draft_model` or the model brings
    that; `standalone` has a smaller model write ahead; `eagle` and `eagle3` have a
    head that was trained for the model guess from its hidden vectors, and so do the heads of
    `medusa`, each one token further; `nextn` does it with the layer for it that the model's
    checkpoint brings."""
    draft_model: str | None = None
    """Directory of the smaller model of `standalone`, which has the tokenizer of the model served,
    or of the head of `eagle` or `eagle3`, or the heads of `medusa`; or of what the model mostly
    says, for `ngram`, as `sylvan train-draft --algorithm ngram` makes it."""
    num_steps: Depth | Auto = "auto"
    """Guesses for one request in one step: the tokens ahead that are guessed."""
    topk: Count | Auto = "auto"
    """Guesses for the same position: above 1, heads guess trees of the likeliest continuations."""
    num_draft_tokens: Count | Auto = "auto"
    """Tokens of one request that a step verifies: the newest one and the guesses after it. One more
    than `num_steps`, unless guesses are trees."""
    adaptive: bool = True
    """Verify as many guesses as make the batch faster, by how often they were right and how long
    steps took; else always all. Tokens are the same either way."""
    min_match: Count = 2
    """Tokens that must have occurred before for `ngram` to guess."""
    max_match: Count = 16
    """Tokens that `ngram` compares at most to find the best place."""
    shared_tokens: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    """Newest tokens of a tenant's requests that have ended in which `ngram` looks, too; 0: it looks
    in the text of the request only."""
    corpus: str | None = None
    """Texts in which `ngram` looks for all requests: a JSONL file of strings, or of objects with
    `text` or `documents`, or a text file with one in each line."""
    corpus_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 131_072
    """Tokens of `corpus` at most; looking takes time that grows with them."""

    def most_samples(self, running_reqs: int) -> int:
        """Rows that a step samples at most: beside each request, all guesses of a few.

        In larger batches guesses cost more than they bring. Needs a resolved section.
        """
        guesses = self.num_draft_tokens - 1 if isinstance(self.num_draft_tokens, int) else 0
        return running_reqs + min(running_reqs, DRAFTING_REQS) * guesses

    def most_paths(self, running_reqs: int) -> int:
        """Paths of trees of guesses in one step, beside the first of each; 0: guesses are chains.

        Needs a resolved section.
        """
        if self.topk == 1 or not isinstance(self.num_draft_tokens, int):
            return 0
        return min(running_reqs, DRAFTING_REQS) * max(1, self.num_draft_tokens - 2)


class DisaggConfig(Section, frozen=True):
    """Prefill and decode on different servers. Present means on."""

    role: Literal["prefill", "decode"] | None = None
    """What this server does; with `--pd` each server gets its own."""
    transfer: Literal["auto", "tcp", "shm", "nixl", "mooncake", "store"] = "auto"
    """How KV moves: out of the other server's memory, where both are on one machine, or over TCP;
    by a library, which both servers need; or through the store of `tiers`, which both have."""
    bootstrap_port: Port = 8998
    """Port on which a prefill server lets decode servers in; 0: any."""
    secret_file: str | None = None
    """File with what both servers know: a peer that does not is refused."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """How long a request waits for its other server without a sign of life from it."""
    fallback: Literal["local", "error"] = "local"
    """What a decode server does when KV does not come: compute the prompt itself, or fail."""
    retraction: Literal["local", "prefill"] = "local"
    """Where a decode server has the KV of a request computed that it had to retract: here, or by
    the prefill server once more."""
    switchable: bool = False
    """Whether operators may switch the role while the server runs (`/pd_role_switch`)."""


class PdMuxConfig(Section, frozen=True):
    """Prompts are computed op by op between the steps of requests that decode. Present means on."""

    wait_ms: Annotated[float, msgspec.Meta(gt=0)] = 50.0
    """A decoding step waits for prompts so long at most, or for one op where that takes longer."""
    min_tokens: Count = 128
    """Shorter prompts are computed in the steps of the others."""


class KVEventsConfig(Section, frozen=True):
    """Tells cache-aware routers which KV blocks are cached, over ZeroMQ. Present means on."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the publisher. Whoever reaches it learns which tokens are cached."""
    replay_endpoint: str | None = None
    """Address at which subscribers ask again for what they missed."""
    topic: str = ""
    """First frame of each message."""
    buffer_steps: Count = 10_000
    """Messages kept for replay."""
    hwm: Count = 100_000
    """Messages queued for a slow subscriber before more are dropped."""
    max_queue_size: Count = 100_000
    """Messages queued for the publisher's thread before more are dropped."""


class TiersConfig(Section, frozen=True):
    """Memories for KV below the device's: the host's, and a store that stays. Present means on."""

    storage: str | None = None
    """Directory or URL: `/var/cache/kv`, `redis://HOST/0`, `s3://BUCKET/PREFIX`,
    `mooncake://MASTER:PORT`, `nixl:///DIR`, or what another package offers; `file` is
    `tiers.directory`. Default: none, until one is attached while serving."""
    directory: str | None = None
    """What `tiers.storage=file` stands for; default: a folder in the user's cache."""
    host_ratio: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Size of a tier in host memory: pages for each page of the device; default: there is none."""
    host_bytes: Bytes | None = None
    """The same as a size (`32GiB`); instead of `tiers.host_ratio`."""
    host_dtype: Literal["same", "int8"] = "same"
    """How that tier keeps keys and values: with the bits that the device has, or rounded to 8 bits,
    which takes half the memory or less and changes answers a little."""
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = (
        "write_through"
    )
    """What goes there: all that no request uses any more, what a second request has used, or what
    is next to be evicted."""
    prefetch: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """How long a request waits for what the store has of its prompt: not at all, until all is
    there, or for a time. With `best_effort` a server also starts when the store cannot be
    reached."""
    prefetch_min_tokens: Count = 256
    """Fewer tokens are computed, not fetched."""
    prefetch_timeout_s: Seconds = 1.0
    """Of `timeout`, for any number of tokens."""
    prefetch_timeout_per_ki_token_s: Seconds = 0.25
    """Of `timeout`, in addition for each 1024 tokens."""
    max_bytes: Bytes | None = None
    """Size of the store; what was not used for longest goes first. For directories."""
    namespace_bytes: Bytes | None = None
    """The same for each tenant or salt by itself."""
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A page that was not used for so long is forgotten. For directories and Redis."""
    key_file: str | None = None
    """File with the operator's key, of 32 bytes at least: pages are encrypted (AES-256-GCM), and
    tenants find their own KV again after a restart, which they do with a key only."""


class ObserveConfig(Section, frozen=True):
    """Logs, metrics, traces and reports."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important messages that are logged."""
    log_format: Literal["text", "json"] = "text"
    """One line of text, or one JSON object, per message."""
    log_requests: bool = False
    """Log each request of a client when it comes and when it is over."""
    log_requests_level: Annotated[int, msgspec.Meta(ge=0, le=3)] = 2
    """How much of it: 0 names, counts and times; 1 sampling parameters as well; 2 the first 2048
    characters of prompt and output as well; 3 all of both."""
    log_requests_format: Literal["text", "json"] = "text"
    """Form of these lines."""
    log_requests_target: tuple[str, ...] = ()
    """Where they go: `stdout`, or folders in which a file is kept for each day; default: to the
    other logs."""
    access_log_exclude: tuple[str, ...] = ()
    """Beginnings of paths that `server.access_log` leaves out: `/metrics,/health`."""
    record: str | None = None
    """Folder for flight recordings of the scheduler, one for each time it starts; `sylvan replay
    FOLDER` plays them back."""
    metrics_prefix: Annotated[str, msgspec.Meta(pattern="^([a-zA-Z_:][a-zA-Z0-9_:]*)?$")] = (
        "sglang:"
    )
    """What names of metrics begin with; dashboards for SGLang expect the default."""
    metric_labels: dict[str, str] = {}
    """Labels that all metrics of the model carry: `region=eu,rack=7`."""
    custom_labels: tuple[str, ...] = ()
    """Names of labels that clients may give in the header `x-custom-labels`, a JSON object; of
    each, 100 values are told apart."""
    ttft_buckets: tuple[float, ...] = ()
    """Upper bounds, in seconds, of the histogram of times to the first token; default: SGLang's."""
    token_buckets: tuple[float, ...] = ()
    """The same of times between tokens."""
    e2e_buckets: tuple[float, ...] = ()
    """The same of whole requests."""
    prompt_token_buckets: tuple[str, ...] = ()
    """Upper bounds of the histograms of prompt lengths: `default`, `tse MIDDLE BASE COUNT` (bounds
    on both sides of MIDDLE, at distances that grow by BASE), or `custom` and numbers."""
    output_token_buckets: tuple[str, ...] = ()
    """The same of output lengths."""
    trace: bool = False
    """Send OpenTelemetry traces of requests; needs the extra `trace`."""
    trace_endpoint: str = "http://localhost:4317"
    """Collector of traces: `http://HOST:4317` takes OTLP over gRPC; with a path, such as
    `http://HOST:4318/v1/traces`, over HTTP."""
    trace_service: str = "sylvan"
    """Name of the service in traces."""
    loop_hold_s: Annotated[float, msgspec.Meta(ge=0.01)] = 0.25
    """A function that holds up the event loop of the API process for longer, and with it all other
    requests, is named in the log and in the metric `sylvan:event_loop_holds`."""
    report_dir: str | None = None
    """Folder for profiles, and for the reports about processes that hung; default: a folder in
    that for temporary files."""


class Config(Section, frozen=True):
    """One runtime."""

    model: str = BUILT_IN_MODEL
    """Directory of a Hugging Face checkpoint, a GGUF file, a URL of either, or `sapling`, the
    built-in chat model."""
    served_model_name: str | None = None
    """Name of the model in the API; default: the last part of its path."""
    weight_version: str = "default"
    """Label of the weights, told in every answer; updates of the weights may bring another."""
    tokenizer: str | None = None
    """Directory or URL of the tokenizer, or a GGUF file; default: the model's own."""
    task: Literal["auto", "generate", "embed", "classify", "both", "vectors"] = "auto"
    """What the model is for: continue texts, turn them into vectors, or classify them. `auto` goes
    by its architecture, `both` generates and embeds, `vectors` is what it can do but generate."""
    load_format: Literal["auto", "safetensors", "gguf", "pt", "dummy"] = "auto"
    """How weights are read; `auto` takes safetensors or GGUF, whichever is there; `pt` reads
    PyTorch's .bin files (tensors only, no code); `dummy` makes weights up (for benchmarks)."""
    load_cache: str | None = None
    """Directory in which packed weights are kept, so that later starts on a CPU read them instead
    of packing the checkpoint again; it takes about as much disk as the weights take memory."""
    trust_remote_code: bool = False
    """Run Python files that the checkpoint brings (`auto_map`), where nothing else serves it. They
    can do whatever you can: only for directories whose makers you trust."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; `auto` is the checkpoint's, where the device is fast at
    it."""
    quantization: Literal["w8a8", "w4a8", "int8", "int4", "w4a16", "fp8"] | None = None
    """Quantise the weights of linear layers to 8 or 4 bits at load time, and what they multiply to
    8; `int8` is `w8a8`, `int4` is `w4a8`. `w4a16` and `fp8` leave what they multiply as it is."""
    context_len: Tokens | Auto = "auto"
    """Longest prompt plus output; `auto` is what the model was made for."""
    device: str = "auto"
    """Where the model runs: `cpu`, `cuda` (NVIDIA), `rocm` (AMD), `xpu` (Intel), or what another
    package offers."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | Auto = "auto"
    """CPU threads of the model's kernels, in each rank."""
    attention: str = "auto"
    """Attention kernels."""
    runner: Literal["auto", "program", "graph", "eager"] = "auto"
    """How a step is executed: recorded once and replayed natively (on a CPU), as graphs captured
    for batch sizes (on a GPU), or operation by operation."""
    runner_fallback: bool | Auto = "auto"
    """Whether a model that cannot be recorded is executed operation by operation instead of being
    refused; `auto` does so unless runner or attention was chosen, or deterministic asked for."""
    deterministic: bool | Auto = "auto"
    """The answer to a request never depends on what else is batched, cached or chunked, bit for
    bit; `true` refuses to start what cannot keep that, `auto` keeps it where native steps run."""
    seed: int | None = None
    """Makes the seeds that requests without one are given the same after every start; default:
    they are drawn afresh."""
    processes: Literal["one", "many"] = "many"
    """Run API, scheduler and detokenizer in processes of their own, or all in this one."""
    chaos: dict[str, str] = {}
    """Faults that the server inflicts on itself, to see what its clients notice:
    `kill-scheduler=0.01,ipc-delay=50ms`. Only for servers that this machine alone can reach."""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    text: TextConfig = TextConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    grammar: GrammarConfig = GrammarConfig()
    lora: LoraConfig | None = None
    media: MediaConfig = MediaConfig()
    speculative: SpeculativeConfig | None = None
    disagg: DisaggConfig | None = None
    pdmux: PdMuxConfig | None = None
    kv_events: KVEventsConfig | None = None
    tiers: TiersConfig | None = None
    observe: ObserveConfig = ObserveConfig()
