"""Settings of a gateway that cannot work, in one place; each says what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sylvan.config.load import LoadedConfig
from sylvan.config.route import RouteConfig
from sylvan.config.values import no_network, not_an_address
from sylvan.protocol.errors import ConfigError

_SELECTORS = ("selector", "prefill_selector", "decode_selector")
_THRESHOLDS = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")
_BY_POLICY: Mapping[str, tuple[str, ...]] = {
    "cache_aware": (*_THRESHOLDS, "max_tree_bytes"),
    "bucket": ("balance_abs_threshold", "balance_rel_threshold", "bucket_adjust_s"),
    "prefix_hash": ("prefix_tokens", "load_factor"),
    "manual": ("assignment", "max_idle_s"),
}


def check_route(loaded: LoadedConfig[RouteConfig]) -> None:
    """Report everything that cannot work at once.

    Raises:
        ConfigError: something was given that cannot work; one line for each.
    """
    lines = [*_of_other_policies(loaded), *_idle(loaded)]
    lines += _processes(loaded.config)
    proxies = loaded.config.server.trusted_proxies
    lines += [not_an_address(proxies)] if no_network(proxies) is not None else []
    if lines:
        raise ConfigError("\n".join(lines))


def _idle(loaded: LoadedConfig[RouteConfig]) -> Iterable[str]:
    """Settings of features that are switched off."""
    discovery = loaded.config.discovery
    for name in (*_SELECTORS, "namespace", "port", "bootstrap_annotation"):
        setting = loaded.given.get(f"discovery.{name}")
        if setting is not None and not discovery.kubernetes:
            yield f"{setting.spelled}: pods are discovered with discovery.kubernetes only"
    labelled = any(getattr(discovery, name) for name in _SELECTORS)
    if discovery.kubernetes and not labelled:
        yield "discovery.kubernetes needs discovery.selector: else every pod would be a worker"
    if bool(discovery.prefill_selector) is not bool(discovery.decode_selector):
        yield "discovery.prefill_selector and discovery.decode_selector must be set together"
    for name in ("jwt_audience", "jwt_jwks_uri", "jwt_role_mapping"):
        setting = loaded.given.get(f"control.{name}")
        if setting is not None and loaded.config.control.jwt_issuer is None:
            yield f"{setting.spelled}: tokens need control.jwt_issuer"
    if loaded.config.control.jwt_issuer is not None and loaded.config.control.jwt_audience is None:
        yield "control.jwt_issuer needs control.jwt_audience: else any audience would be accepted"
    yield from _history(loaded)
    setting = loaded.given.get("observe.trace_endpoint")
    if setting is not None and not loaded.config.observe.trace:
        yield f"{setting.spelled}: tracing needs observe.trace"


def _history(loaded: LoadedConfig[RouteConfig]) -> Iterable[str]:
    """Settings of a history that is switched off, or in a place where it cannot be stored."""
    providers = loaded.config.providers
    kind = "none" if providers is None else providers.history
    file = loaded.given.get("providers.history_file")
    if kind == "none":
        for name in ("history_file", "history_entries", "history_max_bytes", "retention_days"):
            setting = loaded.given.get(f"providers.{name}")
            if setting is not None:
                yield f"{setting.spelled}: storing responses needs providers.history"
    elif kind == "sqlite" and file is None:
        yield "providers.history=sqlite needs providers.history_file"
    elif kind == "memory" and file is not None:
        yield f"{file.spelled} is for providers.history=sqlite, not memory"
    if kind == "memory" and loaded.config.processes > 1:
        yield "processes: providers.history=memory belongs to one process; use sqlite for several"


def _processes(config: RouteConfig) -> Iterable[str]:
    """Reject settings that several processes cannot share."""
    count, limits = config.processes, config.limits
    if count == 1:
        return
    if config.server.uds is not None:
        yield "processes: server.uds cannot be shared; give server.host and server.port"
    if limits.max_concurrent is not None and limits.max_concurrent < count:
        yield f"limits.max_concurrent is divided among {count} processes; give {count} or more"
    port = config.observe.metrics_port
    if port is not None and port + count > 65536:
        yield f"observe.metrics_port: {count} processes need the ports after {port}, too"


def _of_other_policies(loaded: LoadedConfig[RouteConfig]) -> Iterable[str]:
    """A policy is not given what it does not read."""
    routing = loaded.config.routing
    chosen = (routing.policy, routing.prefill_policy, routing.decode_policy)
    used = tuple(dict.fromkeys(policy for policy in chosen if policy is not None))
    read = {name for policy in used for name in _BY_POLICY.get(policy, ())}
    known = {name for names in _BY_POLICY.values() for name in names}
    for path, setting in loaded.given.items():
        section, _, name = path.partition(".")
        if section == "routing" and name in known - read:
            readers = " or ".join(p for p, names in _BY_POLICY.items() if name in names)
            yield f"{setting.spelled} is for routing.policy={readers}, not {' or '.join(used)}"
