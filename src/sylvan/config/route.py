"""The configuration tree of a gateway. One section per component, as in `sylvan.config.tree`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sylvan.config.tree import Section
from sylvan.config.values import Bytes, Count, Natural, Port, Seconds, Secret

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class FrontConfig(Section, frozen=True):
    """Where clients connect."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all."""
    port: Port = 30000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Listen on this unix socket instead of host and port."""
    api_key: Secret | None = None
    """Key that clients must send as `Authorization: Bearer KEY`."""
    api_key_file: str | None = None
    """JSON file of further keys, as SHA-256 hashes, with tenants and their budgets."""
    cors_origins: tuple[str, ...] = ()
    """Web origins that may call the gateway from a browser; `*` for all."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of trusted proxies, whose `X-Forwarded-For` and `X-Forwarded-Proto` are
    believed; default: none."""
    max_body_bytes: Bytes = 512 << 20
    """Largest request body; larger ones are refused with status 413."""
    drain_s: Seconds = 180.0
    """How long running requests may continue after SIGTERM."""
    access_log: bool = False
    """Log one line per HTTP request."""
    request_id_headers: tuple[str, ...] = (
        "x-request-id",
        "x-correlation-id",
        "x-trace-id",
        "request-id",
    )
    """Headers that may carry the request id; the first one present wins."""
    ssl_certfile: str | None = None
    """PEM file with the certificate chain; turns on TLS. New connections use what is in the files
    ten seconds after they changed."""
    ssl_keyfile: str | None = None
    """PEM file with the private key of `server.ssl_certfile`."""
    ssl_keyfile_password: Secret | None = None
    """Password of the private key."""
    ssl_ca_certs: str | None = None
    """PEM file with authorities; clients must show a certificate that one of them signed."""


class WorkersConfig(Section, frozen=True):
    """The runtimes behind the gateway."""

    urls: tuple[str, ...] = ()
    """Addresses of workers, `http://`, `https://` or `grpc://`."""
    prefill_urls: tuple[str, ...] = ()
    """Addresses of prefill workers; `URL#PORT` names the bootstrap port. Needs
    `workers.decode_urls`."""
    decode_urls: tuple[str, ...] = ()
    """Addresses of decode workers."""
    api_key: Secret | None = None
    """Key that the gateway presents to workers given at the start."""
    gateway_key: Secret | None = None
    """Key that identifies the gateway to Sylvan workers (their `server.gateway_key`)."""
    startup_timeout_s: Positive = 1800.0
    """How long a new worker may take to answer."""
    startup_interval_s: Positive = 1.0
    """Seconds between attempts to reach a new worker."""
    max_connections: Count = 1024
    """Most connections to one worker."""
    dp_aware: bool = False
    """Treat each data-parallel rank of a worker as a separate worker."""
    client_certfile: str | None = None
    """PEM file with the certificate that the gateway presents to workers."""
    client_keyfile: str | None = None
    """PEM file with the private key of `workers.client_certfile`."""
    ca_certfiles: tuple[str, ...] = ()
    """PEM files of authorities that sign workers' certificates, in addition to the system's."""


class RoutingConfig(Section, frozen=True):
    """Which worker a request goes to."""

    policy: str = "cache_aware"
    """Routing policy."""
    prefill_policy: str | None = None
    """Policy for prefill workers; default: `routing.policy`."""
    decode_policy: str | None = None
    """Policy for decode workers; default: `routing.policy`."""
    cache_threshold: Share | None = None
    """`cache_aware` with thresholds: smallest share of a prompt that a worker must hold to attract
    it. Setting any of the three thresholds replaces the cost by SGLang's rule."""
    balance_abs_threshold: Natural | None = None
    """`cache_aware` with thresholds: load difference above which the least loaded wins."""
    balance_rel_threshold: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """`cache_aware` with thresholds: load ratio that must be exceeded as well."""
    max_tree_bytes: Bytes = 64 << 20
    """Memory of the approximate prefix tree of one model."""
    cache_events: bool = False
    """Follow the KV events of workers that publish them, which makes `cache_aware` exact."""
    prefix_tokens: Count = 256
    """`prefix_hash`: number of leading prompt tokens that are hashed."""
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25
    """`prefix_hash`: skip a worker with more than this many times the mean load."""
    assignment: Literal["random", "min_load", "min_group"] = "random"
    """`manual`: assignment of a new routing key; `min_group` selects the worker with the fewest
    keys."""
    max_idle_s: Positive = 4 * 3600.0
    """`manual`: routing keys unused for this long are forgotten."""
    bucket_adjust_s: Positive = 5.0
    """`bucket`: seconds between adjustments of the length ranges."""


class RouteLimitsConfig(Section, frozen=True):
    """Admission limits."""

    connections: Count = 16384
    """Most open client connections; never more than file descriptors allow. Idle ones are closed to
    make room."""
    connections_per_address: Count = 16384
    """Most of these from one address; clients behind a proxy share one."""
    head_bytes: Bytes = 64 << 10
    """Largest request line plus headers; larger ones are refused with status 431."""
    head_s: Positive = 15.0
    """Seconds for them to arrive; else status 408."""
    body_s: Positive = 30.0
    """Seconds for a body to arrive, and one more for each 4 KiB of it; else status 408."""
    bodies_bytes: Bytes = 1 << 30
    """Total size of bodies of all running requests; beyond it requests are refused with status 503.
    """
    request_timeout_s: Positive = 1800.0
    """Longest time of one request, including its stream."""
    max_concurrent: Count | None = None
    """Most concurrent requests; more wait in a queue. `none`: no limit."""
    queue_size: Natural = 100
    """Most waiting requests; the next one is refused with status 429."""
    queue_timeout_s: Positive = 60.0
    """Longest waiting time; after it a request is refused with status 408."""
    rate_per_s: Positive | None = None
    """Requests admitted per second, in bursts of at most `limits.max_concurrent`. `none`: no limit.
    """
    slow_client_s: Positive = 600.0
    """Clients that read nothing of their answer for this long are disconnected."""


class RetryConfig(Section, frozen=True):
    """Retries on another worker, as long as the client has received nothing."""

    max_tries: Count = 5
    """Most attempts; 1 disables retries."""
    initial_backoff_ms: Positive = 50.0
    """Pause before the second attempt."""
    max_backoff_ms: Positive = 30_000.0
    """Longest pause."""
    multiplier: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    """Factor by which each pause grows."""
    jitter: Share = 0.2
    """Random variation of a pause, as a share of it."""
    budget: Annotated[float, msgspec.Meta(ge=0)] = 0.2
    """Retry budget: retries earned per request; failures multiply the load by at most one plus
    this."""


class BreakerConfig(Section, frozen=True):
    """Circuit breakers: a worker that keeps failing gets no requests for a while."""

    enabled: bool = True
    """Enable circuit breakers."""
    failures: Count = 10
    """Consecutive failures that open the circuit."""
    successes: Count = 3
    """Consecutive successes that close it again."""
    open_s: Positive = 60.0
    """How long it stays open before requests try the worker again."""
    window_s: Positive = 120.0
    """Failures further apart than this are not consecutive."""


class HealthConfig(Section, frozen=True):
    """Health checks of workers."""

    enabled: bool = True
    """Enable health checks."""
    path: str = "/health"
    """Path to check."""
    interval_s: Positive = 5.0
    """Seconds between checks."""
    timeout_s: Positive = 5.0
    """Timeout of a check."""
    failures: Count = 3
    """Consecutive failed checks that make a worker unhealthy."""
    successes: Count = 2
    """Consecutive successful checks that make it healthy again."""


class FailoverConfig(Section, frozen=True):
    """Failover: streams survive the loss of their worker."""

    enabled: bool = True
    """Continue a stream on another worker when its own is lost."""
    stall_s: Positive = 10.0
    """A worker silent on a stream for this long counts as lost."""
    wait_s: Seconds = 30.0
    """How long requests wait for a worker after the last one was lost; then they are refused with
    status 503. 0: at once."""
    max_moves: Natural = 3
    """Workers that one request may lose in a row without progress; the request may be what kills
    them."""
    journal_bytes: Bytes = 16 << 20
    """Most bytes kept of one stream to continue it."""
    resume_s: Seconds = 30.0
    """How long a stream with event ids waits for its client to reconnect (`Last-Event-ID`)."""
    resume_bytes: Bytes = 8 << 20
    """Most bytes kept of one such stream for the client."""


class DiscoveryConfig(Section, frozen=True):
    """Discovery of workers."""

    file: str | None = None
    """YAML or JSON file that lists workers; reloaded when it changes."""
    dns: str | None = None
    """`NAME:PORT`: every address of that name is a worker."""
    kubernetes: bool = False
    """Discover Kubernetes pods by label selector."""
    selector: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Labels of pods that serve: `app=sylvan,tier=prod`."""
    prefill_selector: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Labels of pods that do prefill."""
    decode_selector: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Labels of pods that decode."""
    port: Port = 80
    """Port of workers that are pods."""
    namespace: str | None = None
    """Namespace of the pods; default: all."""
    bootstrap_annotation: str = "sglang.ai/bootstrap-port"
    """Annotation of a prefill pod that names its bootstrap port."""
    interval_s: Positive = 10.0
    """Seconds between checks of a file or name."""


class TokensConfig(Section, frozen=True):
    """Tokenisation in the gateway, for workers that speak gRPC (token ids)."""

    tokenizer: str | None = None
    """Directory of the tokenizer; default: fetched from the worker."""
    chat_template: str | None = None
    """File with a Jinja chat template; instead of the model's own."""
    tool_parser: str = "auto"
    """Format of tool calls; `auto` goes by the template, `none` leaves them in the text."""
    reasoning_parser: str = "auto"
    """Format of reasoning; `auto` goes by the template, `none` leaves it in the text."""
    cache_entries: Natural = 10_000
    """Most texts with cached token ids; 0 disables the cache."""
    cache_bytes: Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"})] = 50 << 20
    """Memory per model for token ids of text parts, which are cut at control tokens; 0 disables it.
    """


class ProvidersConfig(Section, frozen=True):
    """Pass-through to servers of the OpenAI API. Present means on, instead of workers."""

    file: str | None = None
    """YAML or JSON file of upstreams (address, key, models of each) and fallbacks of models."""
    urls: tuple[str, ...] = ()
    """Addresses of upstreams; their models are queried."""
    history: Literal["memory", "none", "sqlite"] = "none"
    """Where the gateway stores responses and conversations so that any upstream can continue them;
    `none`: each upstream stores its own."""
    history_file: str | None = None
    """File of the `sqlite` history."""
    history_entries: Count = 10_000
    """Responses and conversations kept, together."""
    history_max_bytes: Annotated[int, msgspec.Meta(gt=0, extra={"unit": "bytes"})] = 1 << 30
    """Total size; beyond it the oldest entries of the client with the most are deleted."""
    retention_days: Annotated[float, msgspec.Meta(gt=0)] | None = 30.0
    """Age at which they are deleted; `none`: never."""


class ControlConfig(Section, frozen=True):
    """Control of the gateway."""

    api_keys: tuple[Secret, ...] = ()
    """Keys of operators, each `id:name:role:KEY`, where KEY may be `sha256=HEX`; role is `admin` or
    `user`."""
    audit: bool = False
    """Audit log: one line per call of a control route."""
    jwt_issuer: str | None = None
    """Issuer of accepted tokens; turns on JWT."""
    jwt_audience: str | None = None
    """Audience that tokens must name."""
    jwt_jwks_uri: str | None = None
    """URL of the issuer's keys; default: from its discovery document."""
    jwt_role_mapping: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Mapping of token roles or groups to roles here: `sre=admin,dev=user`."""


class MeasureConfig(Section, frozen=True):
    """Logs, metrics and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of logged messages."""
    log_format: Literal["text", "json"] = "text"
    """One line of text, or one JSON object, per message."""
    log_dir: str | None = None
    """Directory for log files, in addition to standard error."""
    metrics_host: str = "127.0.0.1"
    """Address on which metrics are served."""
    metrics_port: Port | None = 29000
    """Port on which metrics are served; 0 takes a free one, `none` serves none."""
    duration_buckets: tuple[float, ...] = ()
    """Histogram buckets of durations, upper bounds in seconds."""
    trace: bool = False
    """Send OpenTelemetry traces."""
    trace_endpoint: str = "http://localhost:4317"
    """Where traces go: `http://HOST:4317` takes OTLP over gRPC; with a path, such as
    `http://HOST:4318/v1/traces`, over HTTP."""


class RouteConfig(Section, frozen=True):
    """One gateway."""

    processes: Count = 1
    """Processes that share the port; they exchange their placements."""
    server: FrontConfig = FrontConfig()
    workers: WorkersConfig = WorkersConfig()
    routing: RoutingConfig = RoutingConfig()
    limits: RouteLimitsConfig = RouteLimitsConfig()
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    health: HealthConfig = HealthConfig()
    failover: FailoverConfig = FailoverConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    tokens: TokensConfig = TokensConfig()
    providers: ProvidersConfig | None = None
    control: ControlConfig = ControlConfig()
    observe: MeasureConfig = MeasureConfig()
