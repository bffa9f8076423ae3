from __future__ import annotations

import re
from pathlib import Path

import pytest

import sylvan
from sylvan.config.flags import parse_flags
from sylvan.config.load import dump
from sylvan.config.route import RouteConfig
from sylvan.config.route_check import check_route
from sylvan.config.schema import ROUTE
from sylvan.config.sources import gather_as
from sylvan.protocol.errors import ConfigError

PACKAGE = Path(sylvan.__file__).parent
BUDGET = 114  # raising it is a decision


def read(*words, environ=None):
    parsed = parse_flags(words, tree=ROUTE)
    return gather_as(ROUTE, parsed.given, environ=environ or {})


def test_tree_stays_within_its_budget():
    assert len(ROUTE.fields) <= BUDGET


@pytest.mark.parametrize("path", ROUTE.fields)
def test_every_field_is_documented(path):
    doc = ROUTE.fields[path].doc

    assert doc
    assert doc.endswith(".")


def test_every_field_is_read_or_refused():
    files = [*(PACKAGE / "gateway").rglob("*.py"), *(PACKAGE / "cli").glob("*.py")]
    text = "\n".join(path.read_text() for path in files)

    unread = {
        path for path in ROUTE.fields if not re.search(rf"\.{path.rpartition('.')[2]}\b", text)
    }

    assert unread == set()


@pytest.mark.parametrize("name", ROUTE.aliases)
def test_alias_targets_exist_and_are_not_fields(name):
    target = ROUTE.aliases[name].target

    assert not target or target in {*ROUTE.fields, *ROUTE.sections}
    assert name not in ROUTE.fields


@pytest.mark.parametrize(
    ("words", "path", "wanted"),
    [
        ("--worker-urls http://a:1 http://b:2", "workers.urls", ("http://a:1", "http://b:2")),
        ("--policy power-of-two", "routing.policy", "power_of_two"),
        ("--max-concurrent-requests -1", "limits.max_concurrent", None),
        ("--max-concurrent-requests 8", "limits.max_concurrent", 8),
        ("--disable-retries", "retry.max_tries", 1),
        ("--disable-circuit-breaker", "breaker.enabled", False),
        ("--health-check-interval-secs 60", "health.interval_s", 60.0),
        ("--prometheus-duration-buckets 0.1 1", "observe.duration_buckets", (0.1, 1.0)),
        (
            "--prefill http://p:1 9001 --prefill http://q:1 none --decode http://d:1",
            "workers.prefill_urls",
            ("http://p:1#9001", "http://q:1"),
        ),
        (
            "--decode http://d:1 --prefill http://p:1 --decode http://e:1",
            "workers.decode_urls",
            ("http://d:1", "http://e:1"),
        ),
    ],
)
def test_flags_of_the_reference_are_accepted(words, path, wanted):
    config = read(*words.split()).config
    section, _, name = path.partition(".")

    assert getattr(getattr(config, section), name) == wanted


@pytest.mark.parametrize(
    "words",
    [
        "--mini-lb",
        "--mcp-config-path x",
        "--redis-url x",
        "--oracle-username x",
    ],
)
def test_what_is_not_here_is_refused_by_name(words):
    with pytest.raises(ConfigError, match="not supported"):
        read(*words.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--backend openai --providers.history-file x", "needs providers.history"),
        ("--backend openai --providers.history-entries 7", "needs providers.history"),
        ("--backend openai --history-backend sqlite", "needs providers.history_file"),
        ("--backend openai --history-backend memory --providers.history-file x", "not memory"),
        ("--backend openai --history-backend memory --processes 2", "use sqlite for several"),
    ],
)
def test_a_history_is_where_it_can_be(words, why):
    with pytest.raises(ConfigError, match=why):
        check_route(read(*words.split()))
    words = "--backend openai --history-backend sqlite --providers.history-file x --processes 2"
    check_route(read(*words.split()))


def test_servers_that_speak_grpc_are_accepted():
    loaded = read("--worker-urls", "grpc://a:1", "--tokenizer-path", "x")
    check_route(loaded)
    assert loaded.config.tokens.tokenizer == "x"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--service-discovery", "needs discovery.selector"),
        ("--selector a=b", "with discovery.kubernetes only"),
        ("--service-discovery-port 1", "with discovery.kubernetes only"),
        ("--prefill-selector a=b --decode-selector c=d", "with discovery.kubernetes only"),
        ("--service-discovery --prefill-selector a=b", "must be set together"),
        ("--server.trusted-proxies proxy", "'proxy' is no IP address and no network"),
    ],
)
def test_pods_need_a_selector_and_a_selector_pods(words, why):
    with pytest.raises(ConfigError, match=why):
        check_route(read(*words.split()))
    check_route(read("--service-discovery", "--selector", "a=b"))


def test_a_collector_without_traces_is_refused():
    with pytest.raises(ConfigError, match=r"needs observe\.trace"):
        check_route(read("--otlp-traces-endpoint", "http://a:1"))


def test_a_default_that_is_spelt_out_is_no_wish():
    check_route(read("--processes", "1", "--backend", "sglang"))


def test_settings_of_other_policies_are_refused():
    with pytest.raises(ConfigError, match=r"is for routing\.policy=cache_aware, not random"):
        check_route(read("--policy", "random", "--cache-threshold", "0.5"))

    check_route(read("--policy", "bucket", "--balance-abs-threshold", "5"))


def test_variables_have_a_prefix_of_their_own():
    environ = {"SYLVAN_ROUTE_ROUTING__POLICY": "random", "SYLVAN_MODEL": "x"}

    assert read(environ=environ).config.routing.policy == "random"


def test_secrets_are_not_dumped():
    loaded = read("--control-plane-api-keys", "1:ann:admin:secret-a", "--api-key", "secret-b")

    assert loaded.config.control.api_keys[0].reveal() == "1:ann:admin:secret-a"
    assert "secret" not in str(dump(loaded.config, schema=ROUTE))
    assert "secret" not in repr(loaded.config)
    assert dump(RouteConfig(), schema=ROUTE)["routing"]["policy"] == "cache_aware"


def test_settings_of_either_policy_of_a_pair_are_read():
    words = "--prefill-policy bucket --decode-policy manual --bucket-adjust-interval-secs 3"
    check_route(read(*words.split(), "--max-idle-secs", "9"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--processes 2 --uds /tmp/x", "cannot be shared"),
        ("--processes 4 --max-concurrent-requests 3", "divided among 4"),
        ("--processes 2 --prometheus-port 65535", "the ports after"),
        ("--jwt-issuer https://i", "needs control.jwt_audience"),
        ("--jwt-role-mapping a=admin", "tokens need control.jwt_issuer"),
    ],
)
def test_what_cannot_work_is_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        check_route(read(*words.split()))
