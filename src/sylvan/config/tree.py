"""The configuration tree. One section per component; a component is given only its own.

The text under each field is its documentation: `--help`, `docs/reference/config.md` and the web
pages are generated from it. A value `auto` is filled by `sylvan.config.resolve`, with a reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sylvan.config.diffusion import DiffusionConfig
from sylvan.config.limits import LimitsConfig
from sylvan.config.media import MediaConfig
from sylvan.config.parallel import ParallelConfig
from sylvan.config.quantization import Quantization
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
BUILT_IN_MODELS = (BUILT_IN_MODEL, "sapling-vision")
DRAFTING_REQS = 8
"""Largest number of requests whose draft tokens can all be verified in one step."""
DRAFT_HEADS = ("eagle", "eagle3", "medusa")
"""Speculation algorithms with a draft head."""
DRAFT_CONTEXTS = "draft_contexts.npz"
"""File with the n-grams that `ngram` drafts from, in the model's directory or its own."""
OWN_HEAD = "nextn"
"""The algorithm whose head is part of the model's checkpoint."""


class CacheConfig(Section, frozen=True):
    """KV memory and prefix reuse."""

    page_size: Count | Auto = "auto"
    """Tokens per page of the KV cache; prefixes are shared in whole pages."""
    memory: Bytes | Fraction | Auto = "auto"
    """Size of the KV cache (`2GiB`), or the share of device memory for weights and KV cache
    together (`0.85`)."""
    max_tokens: Tokens | Auto = "auto"
    """Size of the KV cache in tokens; replaces `cache.memory`."""
    max_states: Count | Auto = "auto"
    """Slots of recurrent state, for models with recurrent layers: one empty slot, one per running
    request, the rest for cached prefixes."""
    dtype: Literal["model", "fp8_e4m3", "fp8_e5m2", "int8", "int4"] = "model"
    """Data type of keys and values: the model's, or a smaller one, which saves memory and costs
    accuracy: floats with 4 or 5 bits of exponent (`fp8_e4m3`, by the scales of the checkpoint if it
    has some; `fp8_e5m2`), or `int8` or `int4` (heads are rotated first) with a scale per token and
    head."""
    prefix: Literal["radix", "none"] = "radix"
    """Reuse the KV of shared prefixes with a radix tree, or not at all."""
    eviction: str = "lru"
    """Eviction policy: which cached prefixes are evicted first when memory is short."""


class SchedulerConfig(Section, frozen=True):
    """Limits of a step."""

    policy: str = "auto"
    """Order of the waiting requests: `lpm` (longest cached prefix first, with ageing), `fcfs`,
    ..."""
    max_batch_tokens: Tokens | Auto = "auto"
    """Tokens computed in one step, over all requests."""
    chunk_tokens: AnyTokens | Auto = "auto"
    """Most prompt tokens computed in one step, so that prefill does not delay generation; 0 never
    splits a prompt."""
    max_running_reqs: Count | Auto = "auto"
    """Most requests in one step."""
    max_waiting_reqs: Count = 4096
    """Most waiting requests; the next one is refused with status 503."""
    queue_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Longest waiting time; after it a request is refused with status 503."""
    hang_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 300.0
    """A scheduler process without a heartbeat for this long is killed, with its stacks printed, and
    replaced; must exceed the longest step."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Plan the next step while the device computes the current one."""
    conservativeness: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    """Share of `max_new_tokens` that a request is expected to generate, relative to the built-in
    estimate; larger values admit fewer requests and preempt less."""
    preempt_threshold: Natural | None = 10
    """Priority difference at which a waiting request preempts a running one; `none` disables
    preemption by priority."""

    tenant_weights: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1e6)]] = {}
    """Weights of tenants under policy `vtc`: `name=2,other=1`; the default weight is 1."""

    @property
    def inflight(self) -> int:
        """Most steps in flight; needs a resolved `overlap`."""
        assert self.overlap != "auto", "overlap is resolved before it is used"
        return 2 if self.overlap == "on" else 1


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
    """Key that identifies gateways, whose streams other servers can continue; without it, clients
    with access to administrative routes count as gateways."""
    replicas: Count = 1
    """Number of servers of the model, each with its own cache, behind a gateway that this command
    starts. They share the CPU's cores and memory; GPUs are not shared."""
    register: tuple[str, ...] = ()
    """Gateways (`http://HOST:PORT`) at which this server registers, and deregisters when it stops.
    """
    register_key: Secret | None = None
    """Operator key of these gateways."""
    register_url: str | None = None
    """Address at which they reach this server; default: the listening address."""
    root_path: str = ""
    """Path prefix under which a proxy exposes this server."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of trusted proxies, whose `X-Forwarded-For` and `X-Forwarded-Proto` are
    believed; default: none."""
    cors_origins: tuple[str, ...] = ()
    """Web origins that may call this server from a browser; `*` for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which clients may address this server, in addition to `localhost` and loopback
    addresses; `*` for all. If empty, only servers on loopback without a key check the name."""
    max_body_bytes: Bytes = 32 << 20
    """Largest request body; larger ones are refused with status 413."""
    data_dir: str | None = None
    """Directory for uploaded files and batches; without it they are lost when the server stops."""
    response_store_size: Natural = 1024
    """Number of `/v1/responses` answers stored for later reading or continuation; 0 stores none."""
    drain_s: Seconds = 30.0
    """How long running requests may continue after SIGTERM."""
    access_log: bool = False
    """Log one line per HTTP request."""
    ssl_certfile: str | None = None
    """PEM file with the certificate chain; turns on TLS. New connections use what is in the files
    ten seconds after they changed."""
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
    """Format of the model's tool calls; `auto` detects it from the template, `none` leaves them in
    the text."""
    reasoning_parser: str | None = "auto"
    """Format of the model's reasoning; `auto` detects it from the template, `none` leaves it in the
    text."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Default sampling parameters of requests: the model's `generation_config.json`, or OpenAI's
    defaults."""
    incremental_stream: bool = False
    """`/generate` streams only the new text in each event, not the whole text so far."""
    stream_interval: Count = 1
    """Tokens per streamed event, unless the request says otherwise."""
    cache_report: bool = True
    """Report in usage how many prompt tokens came from the cache."""
    stream_include_usage: bool = False
    """End OpenAI streams with usage even if the request does not ask for it."""
    preferred_sampling_params: dict[str, Any] = {}
    """Default sampling parameters of requests: `temperature=0.7,top_p=0.9`, or JSON."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """Default chat-template variables of requests: `enable_thinking=false`, or JSON."""
    shared_system_prompts: tuple[str, ...] = ()
    """Files with system prompts shared by all tenants: their part of the prefix cache is common,
    although each tenant has its own cache."""
    allow_control_text: bool = False
    """Allow control tokens such as `<|im_end|>` in user text. Unsafe: users can then forge messages
    of others."""


class EmbeddingConfig(Section, frozen=True):
    """Vectors of texts."""

    pooling: Literal["cls", "mean", "last", "max", "splade"] | None = None
    """How token vectors are pooled into one; default: as the checkpoint says. `splade`: a number
    for each word of the vocabulary, from the head that fills masks."""
    normalize: bool | None = None
    """Normalise vectors to unit length; default: as the checkpoint says."""


class GrammarConfig(Section, frozen=True):
    """Structured output."""

    backend: str = "auto"
    """Library that compiles schemas, regexes and grammars; `none` refuses requests with them."""
    jump_forward: bool = True
    """Append tokens that the grammar forces without running the model."""
    compile_timeout_s: Annotated[float, msgspec.Meta(gt=0.0)] = 10.0
    """Most CPU seconds for compiling one grammar."""
    max_states: Annotated[int, msgspec.Meta(ge=100, le=10_000_000)] = 50_000
    """Most automaton states of one grammar; they are built during generation, 1 to 2 KiB each."""
    cache_dir: str | None = None
    """Directory that keeps compiled grammars across restarts."""


class LoraConfig(Section, frozen=True):
    """Low-rank adapters, many in one batch. Present means on."""

    adapters: dict[str, str] = {}
    """Adapters to load at start: `name=DIR`, separated by commas."""
    pinned: tuple[str, ...] = ()
    """Names of adapters that are never evicted from host memory and the device."""
    max_per_batch: Count = 8
    """Most different adapters in one batch (device slots). Requests without an adapter need none.
    """
    max_rank: Count | Auto = "auto"
    """Largest rank of an adapter."""
    max_loaded: Count | None = None
    """Most adapters in host memory; default: as many as fit into `lora.memory`. Others are read
    again when requested."""
    memory: Bytes | Auto = "auto"
    """Host memory for adapters."""
    eviction: Literal["lru", "fifo"] = "lru"
    """Which adapter is evicted from the device first: least recently used, or first in."""
    max_overtakes: Count = 32
    """Most requests with other adapters that may start before a request whose adapter waits for a
    slot; then a slot is freed for it."""
    allowed_dirs: tuple[str, ...] = ()
    """Directories from which adapters may be loaded at run time; default: any."""


class SpeculativeConfig(Section, frozen=True):
    """Several tokens per step by drafting and verifying. Present means on."""

    algorithm: str
    """How tokens are drafted. `ngram` repeats what followed the same tokens before, in the prompt
    or the output, plus frequent model output if `draft_model` or the model includes n-grams.
    `standalone` uses a smaller model. `eagle` and `eagle3` use a head that was trained for the
    model and reads its hidden vectors; `medusa` uses several such heads, each for one token
    further; `nextn` uses the prediction layers in the model's checkpoint."""
    draft_model: str | None = None
    """Directory of the smaller model for `standalone`, which needs the same tokenizer; of the head
    for `eagle` or `eagle3`; of the heads for `medusa`; or of the n-grams for `ngram`, written by
    `sylvan train-draft --algorithm ngram`."""
    num_steps: Depth | Auto = "auto"
    """Draft tokens per request and step; the depth of a draft tree."""
    topk: Count | Auto = "auto"
    """Draft tokens per position: above 1, heads draft trees of the most likely continuations."""
    num_draft_tokens: Count | Auto = "auto"
    """Tokens of one request that a step verifies: the newest one and its draft tokens. One more
    than `num_steps`, unless drafts are trees."""
    adaptive: bool = True
    """Verify as many draft tokens as speed up the batch, judged by acceptance rates and step times;
    otherwise always all. Output tokens are the same either way."""
    min_match: Count = 2
    """Shortest match for which `ngram` drafts, in tokens."""
    max_match: Count = 16
    """Longest match that `ngram` compares, in tokens."""
    shared_tokens: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    """Newest tokens of a tenant's finished requests that `ngram` searches as well; 0: only the text
    of the request itself."""
    corpus: str | None = None
    """Texts that `ngram` searches for all requests: a JSONL file of strings, or of objects with
    `text` or `documents`, or a text file with one text per line."""
    corpus_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 131_072
    """Most tokens of `corpus`; search time grows with them."""

    def max_sampled_rows(self, running_reqs: int) -> int:
        """Most sampled rows per step: one per request, plus all draft tokens of a few.

        Drafts do not pay off in larger batches. Needs a resolved section.
        """
        drafts = self.num_draft_tokens - 1 if isinstance(self.num_draft_tokens, int) else 0
        return running_reqs + min(running_reqs, DRAFTING_REQS) * drafts

    def max_paths(self, running_reqs: int) -> int:
        """Most extra paths of draft trees in one step, beyond the first of each; 0: chains only.

        Needs a resolved section.
        """
        if self.topk == 1 or not isinstance(self.num_draft_tokens, int):
            return 0
        return min(running_reqs, DRAFTING_REQS) * max(1, self.num_draft_tokens - 2)


class DisaggConfig(Section, frozen=True):
    """Prefill and decode on different servers. Present means on."""

    role: Literal["prefill", "decode"] | None = None
    """Role of this server; `--pd` sets it for each server."""
    transfer: Literal["auto", "tcp", "shm", "nixl", "mooncake", "store"] = "auto"
    """Transfer of KV: reading the other server's memory on the same machine, TCP, a library that
    both servers need, or the store of `tiers` that both use."""
    bootstrap_port: Port = 8998
    """Port on which a prefill server accepts decode servers; 0: any."""
    secret_file: str | None = None
    """File with a secret shared by both servers; peers without it are refused."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """How long a request waits while its other server is silent."""
    fallback: Literal["local", "error"] = "local"
    """If KV does not arrive, a decode server computes the prompt itself, or fails the request."""
    retraction: Literal["local", "prefill"] = "local"
    """Where a decode server recomputes the KV of a retracted request: locally, or on the prefill
    server."""
    switchable: bool = False
    """Whether operators may switch the role while the server runs (`/pd_role_switch`)."""


class PdMuxConfig(Section, frozen=True):
    """Prompts are computed op by op between the steps of requests that decode. Present means on."""

    wait_ms: Annotated[float, msgspec.Meta(gt=0)] = 50.0
    """Longest time that a decode step waits for prompt work, unless a single op takes longer."""
    min_tokens: Count = 128
    """Shorter prompts are computed in decode steps."""


class KVEventsConfig(Section, frozen=True):
    """Publishes KV cache events to cache-aware routers over ZeroMQ. Present means on."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the publisher. Anyone who can reach it sees which tokens are cached."""
    replay_endpoint: str | None = None
    """Address at which subscribers request a replay of missed messages."""
    topic: str = ""
    """Topic: the first frame of each message."""
    buffer_steps: Count = 10_000
    """Messages kept for replay."""
    hwm: Count = 100_000
    """Messages queued for a slow subscriber before more are dropped."""
    max_queue_size: Count = 100_000
    """Messages queued for the publisher's thread before more are dropped."""


class TiersConfig(Section, frozen=True):
    """KV memory below the device: host memory, and a persistent store. Present means on."""

    storage: str | None = None
    """Store, as a directory or URL: `/var/cache/kv`, `redis://HOST/0`, `s3://BUCKET/PREFIX`,
    `mooncake://MASTER:PORT`, `nixl:///DIR`, or one of another package; `file` means
    `tiers.directory`. Default: none, until one is attached at run time."""
    directory: str | None = None
    """Directory of `tiers.storage=file`; default: a folder in the user's cache."""
    host_ratio: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Size of the host tier, relative to the device's KV cache; default: no host tier."""
    host_bytes: Bytes | None = None
    """Size of the host tier in bytes (`32GiB`); replaces `tiers.host_ratio`."""
    host_dtype: Literal["same", "int8"] = "same"
    """Format of keys and values in the host tier: exact, or rounded to 8 bits, which takes at most
    half the memory and changes answers slightly."""
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = (
        "write_through"
    )
    """KV to write to lower tiers: all KV that no request uses any more, KV used a second time,
    or KV next to be evicted."""
    prefetch: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """How long a request waits for the part of its prompt that the store has: not at all, until all
    of it is loaded, or up to a timeout. With `best_effort`, a server also starts if the store
    cannot be reached."""
    prefetch_min_tokens: Count = 256
    """Shortest prefix worth fetching; fewer tokens are computed."""
    prefetch_timeout_s: Seconds = 1.0
    """Fixed part of the `timeout`."""
    prefetch_timeout_per_ki_token_s: Seconds = 0.25
    """Additional `timeout` per 1024 tokens."""
    max_bytes: Bytes | None = None
    """Largest size of the store; least recently used pages are deleted first. For directories."""
    namespace_bytes: Bytes | None = None
    """Largest size per tenant or salt."""
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Pages unused for this long are deleted. For directories and Redis."""
    key_file: str | None = None
    """File with the operator's key, at least 32 bytes: pages are encrypted (AES-256-GCM), and
    tenants find their KV again after a restart, which needs a key."""


class ObserveConfig(Section, frozen=True):
    """Logs, metrics, traces and reports."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of logged messages."""
    log_format: Literal["text", "json"] = "text"
    """One line of text, or one JSON object, per message."""
    log_requests: bool = False
    """Log each request when it arrives and when it ends."""
    log_requests_level: Annotated[int, msgspec.Meta(ge=0, le=3)] = 2
    """Detail of that log: 0 names, counts and times; 1 adds sampling parameters; 2 adds the first
    2048 characters of prompt and output; 3 logs both in full."""
    log_requests_format: Literal["text", "json"] = "text"
    """Format of these lines."""
    log_requests_target: tuple[str, ...] = ()
    """Destination: `stdout`, or directories with one file per day; default: the normal log."""
    access_log_exclude: tuple[str, ...] = ()
    """Path prefixes that `server.access_log` omits: `/metrics,/health`."""
    record: str | None = None
    """Directory for flight recordings of the scheduler, one per start; `sylvan replay DIR` plays
    them back."""
    metrics_prefix: Annotated[str, msgspec.Meta(pattern="^([a-zA-Z_:][a-zA-Z0-9_:]*)?$")] = (
        "sglang:"
    )
    """Prefix of metric names; dashboards for SGLang expect the default."""
    metric_labels: dict[str, str] = {}
    """Labels of all metrics: `region=eu,rack=7`."""
    custom_labels: tuple[str, ...] = ()
    """Label names that clients may set in the header `x-custom-labels`, a JSON object; at most 100
    values per label are distinguished."""
    ttft_buckets: tuple[float, ...] = ()
    """Histogram buckets of the time to first token, upper bounds in seconds; default: SGLang's."""
    token_buckets: tuple[float, ...] = ()
    """Histogram buckets of the time between tokens."""
    e2e_buckets: tuple[float, ...] = ()
    """Histogram buckets of the time of whole requests."""
    prompt_token_buckets: tuple[str, ...] = ()
    """Histogram buckets of prompt lengths: `default`, `tse MIDDLE BASE COUNT` (bounds on both sides
    of MIDDLE, at distances that grow by BASE), or `custom` and numbers."""
    output_token_buckets: tuple[str, ...] = ()
    """Histogram buckets of output lengths."""
    trace: bool = False
    """Send OpenTelemetry traces of requests; needs the extra `trace`."""
    trace_endpoint: str = "http://localhost:4317"
    """Trace collector: `http://HOST:4317` speaks OTLP over gRPC; with a path, such as
    `http://HOST:4318/v1/traces`, over HTTP."""
    trace_service: str = "sylvan"
    """Name of the service in traces."""
    loop_hold_s: Annotated[float, msgspec.Meta(ge=0.01)] = 0.25
    """Functions that block the event loop of the API process, and so all other requests, for longer
    are reported in the log and in the metric `sylvan:event_loop_holds`."""
    report_dir: str | None = None
    """Directory for profiles and hang reports; default: a directory among temporary files."""


class Config(Section, frozen=True):
    """One runtime."""

    model: str = BUILT_IN_MODEL
    """Directory of a Hugging Face checkpoint, a GGUF file, a URL of either, or a built-in chat
    model: `sapling`, or `sapling-vision`, which sees."""
    served_model_name: str | None = None
    """Name of the model in the API; default: the last part of its path."""
    weight_version: str = "default"
    """Version label of the weights, returned in every answer; weight updates may change it."""
    tokenizer: str | None = None
    """Directory or URL of the tokenizer, or a GGUF file; default: the model's own."""
    task: Literal["auto", "generate", "embed", "classify", "both", "vectors"] = "auto"
    """Task of the model: generate text, embed, or classify. `auto` depends on its architecture,
    `both` generates and embeds, `vectors` is whatever it can do besides generating."""
    load_format: Literal["auto", "safetensors", "gguf", "pt", "dummy"] = "auto"
    """Format of the weights; `auto` takes safetensors or GGUF, whichever exists; `pt` reads
    PyTorch's .bin files (tensors only, no code); `dummy` uses random weights (for benchmarks)."""
    load_cache: str | None = "auto"
    """Directory that caches packed weights and step programs, so that later starts on a CPU read
    them instead of packing the checkpoint again, and serve before PyTorch is imported; needs about
    as much disk as the weights take memory. `auto` takes `sylvan/load` in the user's cache
    directory (`XDG_CACHE_HOME`, or `~/.cache`) if it can be written, and at most a quarter of its
    disk; `none`: nothing is cached."""
    trust_remote_code: bool = False
    """Run Python files of the checkpoint (`auto_map`) if nothing else can serve it. They can do
    anything you can: only use directories from people you trust."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; `auto` uses the checkpoint's if the device supports it at
    full speed."""
    quantization: Quantization | None = None
    """Quantise the weights of linear layers to 8 or 4 bits at load time, and their inputs to 8;
    `int8` is `w8a8`, `int4` is `w4a8`. All others keep the inputs. Names of stored formats (`awq`,
    `gptq` and so on) only check that the checkpoint is that."""
    fp8_activations: bool = False
    """Round the inputs of FP8 matrices to e4m3 as well, on GPUs that multiply such numbers: prompts
    take less time, and answers are less close to the unquantised model's."""
    context_len: Tokens | Auto = "auto"
    """Longest prompt plus output; `auto` is the model's limit."""
    device: str = "auto"
    """Device: `cpu`, `cuda` (NVIDIA), `rocm` (AMD), `xpu` (Intel), or one of another package."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | Auto = "auto"
    """CPU threads of the kernels, per rank."""
    attention: str = "auto"
    """Attention backend."""
    runner: Literal["auto", "program", "graph", "eager"] = "auto"
    """How steps run: recorded once and replayed natively (on a CPU), as graphs captured for batch
    sizes (on a GPU), or operation by operation."""
    runner_fallback: bool | Auto = "auto"
    """Whether to run a model that cannot be recorded operation by operation instead of refusing it;
    `auto` does so unless runner or attention was set, or deterministic requested."""
    deterministic: bool | Auto = "auto"
    """Answers never depend on what else is batched, cached or chunked, bit for bit; `true` refuses
    configurations that cannot guarantee it, `auto` guarantees it where native steps run."""
    seed: int | None = None
    """Seed of the generator that gives requests without a seed theirs, so restarts repeat them;
    default: random."""
    processes: Literal["one", "many"] = "many"
    """Run API, scheduler and detokenizer in separate processes, or all in this one."""
    chaos: dict[str, str] = {}
    """Faults that the server injects into itself for testing: `kill-scheduler=0.01,ipc-delay=50ms`.
    Only for servers reachable from this machine alone."""
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
    diffusion: DiffusionConfig = DiffusionConfig()
    speculative: SpeculativeConfig | None = None
    disagg: DisaggConfig | None = None
    pdmux: PdMuxConfig | None = None
    kv_events: KVEventsConfig | None = None
    tiers: TiersConfig | None = None
    observe: ObserveConfig = ObserveConfig()
