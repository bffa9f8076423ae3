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
    """Addresses or networks of proxies whose word on who calls counts (`X-Forwarded-For`,
    `X-Forwarded-Proto`); default: nobody's."""
    max_body_bytes: Bytes = 512 << 20
    """A larger request body is refused with status 413."""
    drain_s: Seconds = 180.0
    """After SIGTERM, how long running requests may take to end."""
    access_log: bool = False
    """Log one line per HTTP request."""
    request_id_headers: tuple[str, ...] = (
        "x-request-id",
        "x-correlation-id",
        "x-trace-id",
        "request-id",
    )
    """Headers that may carry the id of a request, the first that does wins."""
    ssl_certfile: str | None = None
    """PEM file with the certificate chain; turns on TLS."""
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
    """Key by which Sylvan workers know the gateway (their `server.gateway_key`)."""
    startup_timeout_s: Positive = 1800.0
    """How long a new worker may take until it answers."""
    startup_interval_s: Positive = 1.0
    """Seconds between attempts to reach a new worker."""
    max_connections: Count = 1024
    """Connections to one worker at a time."""
    dp_aware: bool = False
    """Route to each data-parallel rank of a worker as to a worker of its own."""
    client_certfile: str | None = None
    """PEM file with the certificate that the gateway shows to workers."""
    client_keyfile: str | None = None
    """PEM file with the private key of `workers.client_certfile`."""
    ca_certfiles: tuple[str, ...] = ()
    """PEM files of authorities that workers' certificates are checked against, besides the
    system's."""


class RoutingConfig(Section, frozen=True):
    """Which worker a request goes to."""

    policy: str = "cache_aware"
    """Routing policy."""
    prefill_policy: str | None = None
    """Policy for prefill workers; default: `routing.policy`."""
    decode_policy: str | None = None
    """Policy for decode workers; default: `routing.policy`."""
    cache_threshold: Share | None = None
    """`cache_aware` with thresholds: least share of a prompt that a worker must hold to attract it.
    Giving any of the three thresholds replaces the cost by SGLang's rule."""
    balance_abs_threshold: Natural | None = None
    """`cache_aware` with thresholds: difference of loads beyond which the least loaded wins."""
    balance_rel_threshold: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """`cache_aware` with thresholds: ratio of loads that must be exceeded, too."""
    max_tree_bytes: Bytes = 64 << 20
    """Memory of the approximate prefix tree of one model."""
    cache_events: bool = False
    """Follow the cache events of workers, which makes `cache_aware` exact where there are any."""
    prefix_tokens: Count = 256
    """`prefix_hash`: tokens at the start of a prompt that decide."""
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25
    """`prefix_hash`: a worker with more than so many times the mean load is passed over."""
    assignment: Literal["random", "min_load", "min_group"] = "random"
    """`manual`: who gets a routing key that is new; `min_group` is the worker with the fewest
    keys."""
    max_idle_s: Positive = 4 * 3600.0
    """`manual`: a routing key that is not used for so long is forgotten."""
    bucket_adjust_s: Positive = 5.0
    """`bucket`: seconds between adjustments of the length classes."""


class RouteLimitsConfig(Section, frozen=True):
    """How much is let in."""

    connections: Count = 16384
    """Connections of clients that are open at a time; never more than there are file descriptors
    for. Idle ones end to make room."""
    connections_per_address: Count = 16384
    """Of these, from one address; clients behind a proxy share one."""
    head_bytes: Bytes = 64 << 10
    """Request line and headers of a request; larger ones are refused with status 431."""
    head_s: Positive = 15.0
    """Seconds in which they have to arrive; else status 408."""
    body_s: Positive = 30.0
    """Seconds for a body to arrive, and one more for each 4 KiB of it; else status 408."""
    bodies_bytes: Bytes = 1 << 30
    """Bodies of all requests under way together; one more is refused with status 503."""
    request_timeout_s: Positive = 1800.0
    """Longest time of one request, its stream included."""
    max_concurrent: Count | None = None
    """Requests at the same time; more wait in a queue. `none`: no limit."""
    queue_size: Natural = 100
    """Requests that may wait; one more is refused with status 429."""
    queue_timeout_s: Positive = 60.0
    """A request that waited longer is refused with status 408."""
    rate_per_s: Positive | None = None
    """Requests let in a second, in bursts of `limits.max_concurrent` at most. `none`: no limit."""
    slow_client_s: Positive = 600.0
    """A client that takes nothing of its answer for so long is cut off."""


class RetryConfig(Section, frozen=True):
    """Another worker is tried, as long as the client has seen nothing."""

    max_tries: Count = 5
    """Attempts in all; 1 never tries again."""
    initial_backoff_ms: Positive = 50.0
    """Pause before the second attempt."""
    max_backoff_ms: Positive = 30_000.0
    """Longest pause."""
    multiplier: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    """Each pause is so many times the one before."""
    jitter: Share = 0.2
    """Share of a pause by which it varies at random."""
    budget: Annotated[float, msgspec.Meta(ge=0)] = 0.2
    """Retries that a request earns for all; a storm of failures cannot multiply the load by more
    than one plus this."""


class BreakerConfig(Section, frozen=True):
    """A worker that keeps failing is left alone for a while."""

    enabled: bool = True
    """Use circuit breakers."""
    failures: Count = 10
    """Failures in a row that open the circuit."""
    successes: Count = 3
    """Successes in a row that close it again."""
    open_s: Positive = 60.0
    """How long it stays open before requests try it."""
    window_s: Positive = 120.0
    """Failures that lie further apart are not in a row."""


class HealthConfig(Section, frozen=True):
    """Workers are asked how they are."""

    enabled: bool = True
    """Check workers."""
    path: str = "/health"
    """What is asked."""
    interval_s: Positive = 5.0
    """Seconds between checks."""
    timeout_s: Positive = 5.0
    """A check that takes longer has failed."""
    failures: Count = 3
    """Failed checks in a row that make a worker unhealthy."""
    successes: Count = 2
    """Good ones in a row that make it healthy again."""


class FailoverConfig(Section, frozen=True):
    """Streams outlive their worker."""

    enabled: bool = True
    """Continue a stream on another worker when its own is lost."""
    stall_s: Positive = 10.0
    """A worker that shows no sign of life on a stream for so long is lost."""
    max_moves: Natural = 3
    """Workers that one request may lose in a row without progress; it may be what kills them."""
    journal_bytes: Bytes = 16 << 20
    """What is kept of one stream so that it can be continued."""
    resume_s: Seconds = 30.0
    """How long a stream with event ids waits for its client to come back (`Last-Event-ID`)."""
    resume_bytes: Bytes = 8 << 20
    """What is kept of one such stream for the client."""


class DiscoveryConfig(Section, frozen=True):
    """Workers that come and go."""

    file: str | None = None
    """YAML or JSON file that lists workers; it is read again when it changes."""
    dns: str | None = None
    """`NAME:PORT`: every address of that name is a worker."""
    kubernetes: bool = False
    """Pods that match a selector are workers."""
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
    """Seconds between looks at a file or a name."""


class TokensConfig(Section, frozen=True):
    """Text in the gateway: for workers that speak gRPC, which take and give token ids."""

    tokenizer: str | None = None
    """Directory of the tokenizer; default: fetched from the worker."""
    chat_template: str | None = None
    """File with a Jinja chat template; instead of the model's own."""
    tool_parser: str = "auto"
    """Format of tool calls; `auto` goes by the template, `none` leaves them in the text."""
    reasoning_parser: str = "auto"
    """Format of reasoning; `auto` goes by the template, `none` leaves it in the text."""
    cache_entries: Natural = 10_000
    """Texts whose token ids are kept; 0 keeps none."""
    cache_bytes: Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"})] = 50 << 20
    """Memory for ids of parts of texts, which are cut at control tokens, of each model; 0 keeps
    none."""


class ProvidersConfig(Section, frozen=True):
    """Pass-through to servers of the OpenAI API. Present means on, instead of workers."""

    file: str | None = None
    """YAML or JSON file of upstreams (address, key, models of each) and fallbacks of models."""
    urls: tuple[str, ...] = ()
    """Addresses of upstreams; their models are asked for."""
    history: Literal["memory", "none", "sqlite"] = "none"
    """Where the gateway keeps responses and conversations, for any upstream to go on with; `none`:
    each upstream keeps its own."""
    history_file: str | None = None
    """File of the history `sqlite`."""
    history_entries: Count = 10_000
    """Responses and conversations kept, together."""
    history_max_bytes: Annotated[int, msgspec.Meta(gt=0, extra={"unit": "bytes"})] = 1 << 30
    """Size of all of them; when they are more, the oldest go of the client that has most."""
    retention_days: Annotated[float, msgspec.Meta(gt=0)] | None = 30.0
    """Age at which they are forgotten; `none`: never."""


class ControlConfig(Section, frozen=True):
    """Who may steer the gateway."""

    api_keys: tuple[Secret, ...] = ()
    """Keys of operators, each `id:name:role:KEY`, where KEY may be `sha256=HEX`; role is `admin` or
    `user`."""
    audit: bool = False
    """Log who did what: one line for each call of a control route."""
    jwt_issuer: str | None = None
    """Issuer of accepted tokens; turns on JWT."""
    jwt_audience: str | None = None
    """Audience that tokens must name."""
    jwt_jwks_uri: str | None = None
    """Where the issuer's keys are; default: as its discovery document says."""
    jwt_role_mapping: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Roles or groups of tokens to our roles: `sre=admin,dev=user`."""


class MeasureConfig(Section, frozen=True):
    """Logs, metrics and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important messages that are logged."""
    log_format: Literal["text", "json"] = "text"
    """One line of text, or one JSON object, per message."""
    log_dir: str | None = None
    """Folder for log files, besides standard error."""
    metrics_host: str = "127.0.0.1"
    """Address on which metrics are served."""
    metrics_port: Port | None = 29000
    """Port on which metrics are served; 0 takes a free one, `none` serves none."""
    duration_buckets: tuple[float, ...] = ()
    """Upper bounds of the histograms of durations, in seconds."""
    trace: bool = False
    """Send OpenTelemetry traces."""
    trace_endpoint: str = "http://localhost:4317"
    """Where traces go: `http://HOST:4317` takes OTLP over gRPC; with a path, such as
    `http://HOST:4318/v1/traces`, over HTTP."""


class RouteConfig(Section, frozen=True):
    """One gateway."""

    processes: Count = 1
    """Processes that share the port; they tell each other what they placed."""
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
