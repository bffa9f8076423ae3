"""Other names for the fields of a gateway: a few short ones, and the flags of SGLang's router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from sylvan.config.aliases import Alias, Pairs, is_on, plain_text


def route_aliases() -> Mapping[str, Alias]:
    """All aliases by name in the spelling of Python."""
    return _ALL


_RENAMED = {
    "host": "server.host",
    "port": "server.port",
    "uds": "server.uds",
    "api_key": "server.api_key",
    "policy": "routing.policy",
    "prefill_policy": "routing.prefill_policy",
    "decode_policy": "routing.decode_policy",
    "log_level": "observe.log_level",
    "gateway_key": "workers.gateway_key",
    "worker_startup_timeout_secs": "workers.startup_timeout_s",
    "worker_startup_check_interval": "workers.startup_interval_s",
    "client_cert_path": "workers.client_certfile",
    "client_key_path": "workers.client_keyfile",
    "cache_threshold": "routing.cache_threshold",
    "balance_abs_threshold": "routing.balance_abs_threshold",
    "balance_rel_threshold": "routing.balance_rel_threshold",
    "max_tree_size": "routing.max_tree_bytes",
    "max_idle_secs": "routing.max_idle_s",
    "assignment_mode": "routing.assignment",
    "bucket_adjust_interval_secs": "routing.bucket_adjust_s",
    "max_payload_size": "server.max_body_bytes",
    "shutdown_grace_period_secs": "server.drain_s",
    "tls_cert_path": "server.ssl_certfile",
    "tls_key_path": "server.ssl_keyfile",
    "request_timeout_secs": "limits.request_timeout_s",
    "queue_size": "limits.queue_size",
    "queue_timeout_secs": "limits.queue_timeout_s",
    "rate_limit_tokens_per_second": "limits.rate_per_s",
    "retry_max_retries": "retry.max_tries",
    "retry_initial_backoff_ms": "retry.initial_backoff_ms",
    "retry_max_backoff_ms": "retry.max_backoff_ms",
    "retry_backoff_multiplier": "retry.multiplier",
    "retry_jitter_factor": "retry.jitter",
    "cb_failure_threshold": "breaker.failures",
    "cb_success_threshold": "breaker.successes",
    "cb_timeout_duration_secs": "breaker.open_s",
    "cb_window_duration_secs": "breaker.window_s",
    "health_failure_threshold": "health.failures",
    "health_success_threshold": "health.successes",
    "health_check_timeout_secs": "health.timeout_s",
    "health_check_interval_secs": "health.interval_s",
    "health_check_endpoint": "health.path",
    "service_discovery_port": "discovery.port",
    "service_discovery_namespace": "discovery.namespace",
    "bootstrap_port_annotation": "discovery.bootstrap_annotation",
    "prometheus_host": "observe.metrics_host",
    "prometheus_port": "observe.metrics_port",
    "otlp_traces_endpoint": "observe.trace_endpoint",
    "log_dir": "observe.log_dir",
    "tokenizer_path": "tokens.tokenizer",
    "model_path": "tokens.tokenizer",
    "chat_template": "tokens.chat_template",
    "tool_call_parser": "tokens.tool_parser",
    "reasoning_parser": "tokens.reasoning_parser",
    "tokenizer_cache_l0_max_entries": "tokens.cache_entries",
    "tokenizer_cache_l1_max_memory": "tokens.cache_bytes",
    "jwt_issuer": "control.jwt_issuer",
    "jwt_audience": "control.jwt_audience",
    "jwt_jwks_uri": "control.jwt_jwks_uri",
}

_SWITCHES: Mapping[str, tuple[str, object]] = {
    "dp_aware": ("workers.dp_aware", True),
    "disable_retries": ("retry.max_tries", 1),
    "disable_circuit_breaker": ("breaker.enabled", False),
    "disable_health_check": ("health.enabled", False),
    "service_discovery": ("discovery.kubernetes", True),
    "enable_trace": ("observe.trace", True),
    "control_plane_audit_enabled": ("control.audit", True),
}

_LISTS = {
    "worker_urls": "workers.urls",
    "ca_cert_paths": "workers.ca_certfiles",
    "cors_allowed_origins": "server.cors_origins",
    "request_id_headers": "server.request_id_headers",
    "prometheus_duration_buckets": "observe.duration_buckets",
    "control_plane_api_keys": "control.api_keys",
}

_TABLES = {
    "selector": "discovery.selector",
    "prefill_selector": "discovery.prefill_selector",
    "decode_selector": "discovery.decode_selector",
    "jwt_role_mapping": "control.jwt_role_mapping",
}

_NEEDLESS_SWITCHES = {
    "enable_igw": "several models are always served",
    "pd_disaggregation": "prefill and decode workers are paired wherever there are any",
    "tokenizer_cache_enable_l0": "texts are cached unless tokens.cache_entries is 0",
    "tokenizer_cache_enable_l1": "parts of texts are cached unless tokens.cache_bytes is 0",
}

_NEEDLESS = {
    "eviction_interval_secs": "the prefix tree never grows beyond routing.max_tree_bytes",
}

_REFUSED: Mapping[str, str] = {
    "mini_lb": "the mini load balancer (pairs of workers are served without it)",
    "mcp_config_path": "calling tools of MCP servers",
    "postgres_db_url": "a history in PostgreSQL (providers.history=sqlite keeps one in a file)",
    "postgres_pool_max": "a history in PostgreSQL",
    "redis_url": "a history in Redis (providers.history=sqlite keeps one in a file)",
    "redis_pool_max": "a history in Redis",
    "redis_retention_days": "a history in Redis",
    **{
        f"oracle_{name}": "a history in Oracle (providers.history=sqlite keeps one in a file)"
        for name in (
            "wallet_path",
            "tns_alias",
            "connect_descriptor",
            "username",
            "password",
            "pool_min",
            "pool_max",
            "pool_timeout_secs",
        )
    },
}


_REFUSED_SWITCHES = ("mini_lb",)


def _renamed(target: str) -> Alias:
    return Alias(target, lambda value: ((target, value),))


def _switch(target: str, value: object) -> Alias:
    return Alias(target, lambda on: ((target, value),) if is_on(on) else (), is_switch=True)


def _list(target: str) -> Alias:
    return Alias(target, lambda value: ((target, _words(value)),), takes_many=True)


def _table(target: str) -> Alias:
    """`k=v` words, or one `k=v,k=v`."""
    return Alias(target, lambda value: ((target, ",".join(_words(value))),), takes_many=True)


def _needless(reason: str, *, is_switch: bool) -> Alias:
    return Alias("", lambda _: (), is_switch=is_switch, note=reason)


def _refused(feature: str) -> Alias:
    def convert(value: object) -> Pairs:
        raise ValueError(f"not supported: {feature}")

    return Alias("", convert)


def _refused_switch(feature: str) -> Alias:
    def convert(value: object) -> Pairs:
        if is_on(value):
            raise ValueError(f"not supported: {feature}")
        return ()

    return Alias("", convert, is_switch=True)


def _words(value: object) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in cast("Sequence[object]", value)]
    return str(value).split()


def _prefill(value: object) -> Pairs:
    """Words `URL [PORT]`, one pair after the other; the port may be `none`."""
    urls: list[str] = []
    for word in _words(value):
        if "://" in word:
            urls.append(word)
        elif not urls or "#" in urls[-1]:
            raise ValueError(f"expected URL [PORT], got {word!r}")
        elif word.lower() != "none":
            urls[-1] += f"#{int(word)}"
    yield "workers.prefill_urls", urls


def _concurrent(value: object) -> Pairs:
    """SGLang takes -1 for no limit."""
    yield "limits.max_concurrent", None if plain_text(value) == "-1" else value


def _backend(value: object) -> Pairs:
    match plain_text(value):
        case "sglang" | "sylvan":
            return ()
        case "openai":
            return (("providers", {}),)
        case _:
            raise ValueError(f"expected sglang | openai, got {value!r}")


def _history(value: object) -> Pairs:
    match plain_text(value):
        case "none":
            return ()
        case "memory" | "sqlite" as kind:
            return (("providers.history", kind),)
        case _:
            raise ValueError(f"expected memory | none | sqlite, got {value!r}")


_ALL: Mapping[str, Alias] = {
    **{name: _renamed(path) for name, path in _RENAMED.items()},
    **{name: _switch(*args) for name, args in _SWITCHES.items()},
    **{name: _list(path) for name, path in _LISTS.items()},
    **{name: _table(path) for name, path in _TABLES.items()},
    **{name: _needless(reason, is_switch=True) for name, reason in _NEEDLESS_SWITCHES.items()},
    **{name: _needless(reason, is_switch=False) for name, reason in _NEEDLESS.items()},
    **{name: _refused(feature) for name, feature in _REFUSED.items()},
    **{name: _refused_switch(_REFUSED[name]) for name in _REFUSED_SWITCHES},
    "prefill": Alias("workers.prefill_urls", _prefill, takes_many=True, repeats=True),
    "decode": Alias(
        "workers.decode_urls",
        lambda value: (("workers.decode_urls", _words(value)),),
        takes_many=True,
        repeats=True,
    ),
    "max_concurrent_requests": Alias("limits.max_concurrent", _concurrent),
    "backend": Alias("providers", _backend),
    "history_backend": Alias("providers.history", _history),
}
