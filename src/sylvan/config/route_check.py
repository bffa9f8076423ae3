"""Settings of a gateway that cannot work, in one place; each says what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sylvan.config.fields import get
from sylvan.config.load import Loaded
from sylvan.config.route import RouteConfig
from sylvan.config.schema import ROUTE
from sylvan.protocol.errors import ConfigError

PENDING: Mapping[str, str] = {
    "processes": "several gateway processes",
    "workers.prefill_urls": "pairs of prefill and decode servers",
    "workers.decode_urls": "pairs of prefill and decode servers",
    "routing.cache_events": "following cache events",
    "routing.prefill_policy": "pairs of prefill and decode servers",
    "routing.decode_policy": "pairs of prefill and decode servers",
    **dict.fromkeys(
        (
            "discovery.kubernetes",
            "discovery.selector",
            "discovery.prefill_selector",
            "discovery.decode_selector",
            "discovery.port",
            "discovery.namespace",
            "discovery.bootstrap_annotation",
        ),
        "discovery in Kubernetes (discovery.dns follows a headless service)",
    ),
    "tokens.cache_bytes": "a cache of prefixes of texts (tokens.cache_entries keeps whole ones)",
    **dict.fromkeys(
        (
            "providers.history",
            "providers.history_file",
            "providers.history_entries",
            "providers.retention_days",
        ),
        "a history of responses and conversations",
    ),
    "control.jwt_issuer": "JWT (control.api_keys has keys of operators)",
    "control.jwt_audience": "JWT",
    "control.jwt_jwks_uri": "JWT",
    "control.jwt_role_mapping": "JWT",
}
"""What does not exist yet, by field or section."""
_THRESHOLDS = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")
_BY_POLICY: Mapping[str, tuple[str, ...]] = {
    "cache_aware": (*_THRESHOLDS, "max_tree_bytes"),
    "bucket": ("balance_abs_threshold", "balance_rel_threshold", "bucket_adjust_s"),
    "prefix_hash": ("prefix_tokens", "load_factor"),
    "manual": ("assignment", "max_idle_s"),
}


def check_route(loaded: Loaded[RouteConfig]) -> None:
    """Report everything that cannot work at once.

    Raises:
        ConfigError: something was given that cannot work; one line for each.
    """
    lines = [*_pending(loaded), *_of_other_policies(loaded), *_idle(loaded)]
    if lines:
        raise ConfigError("\n".join(lines))


def _pending(loaded: Loaded[RouteConfig]) -> Iterable[str]:
    for path, setting in loaded.given.items():
        lacks = PENDING.get(path) or PENDING.get(path.partition(".")[0])
        field = ROUTE.fields.get(path)
        neutral = field is not None and get(loaded.config, path) == field.default
        if lacks and not neutral:
            yield f"{setting.spelled}: not supported yet: {lacks}"


def _idle(loaded: Loaded[RouteConfig]) -> Iterable[str]:
    """Settings of what is off."""
    setting = loaded.given.get("observe.trace_endpoint")
    if setting is not None and not loaded.config.observe.trace:
        yield f"{setting.spelled}: nothing is traced without observe.trace"


def _of_other_policies(loaded: Loaded[RouteConfig]) -> Iterable[str]:
    """A policy is not given what it does not read."""
    policy = loaded.config.routing.policy
    known = {name for names in _BY_POLICY.values() for name in names}
    for path, setting in loaded.given.items():
        section, _, name = path.partition(".")
        if section == "routing" and name in known - set(_BY_POLICY.get(policy, ())):
            readers = " or ".join(p for p, names in _BY_POLICY.items() if name in names)
            yield f"{setting.spelled} is for routing.policy={readers}, not {policy}"
