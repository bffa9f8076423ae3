from __future__ import annotations

import pytest

from sylvan.config.fields import fields
from sylvan.config.parse import parse, parse_size
from sylvan.config.values import Secret


def value_of(path, raw):
    return parse(fields()[path], raw)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("32k", 32_000),
        ("32K", 32_000),
        ("32Ki", 32_768),
        ("2GiB", 2 << 30),
        ("2gb", 2_000_000_000),
        ("0.5MiB", 1 << 19),
        ("1T", 10**12),
        ("0.5", None),
        ("2i", None),
        ("-3", None),
        ("many", None),
        ("", None),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("path", "raw", "value"),
    [
        ("cache.page_size", "16", 16),
        ("cache.page_size", "auto", "auto"),
        ("cache.page_size", 16, 16),
        ("cache.memory", "2GiB", 2 << 30),
        ("cache.memory", "0.85", 0.85),
        ("cache.memory", 0.85, 0.85),
        ("cache.memory", "AUTO", "auto"),
        ("cache.prefix", "none", "none"),
        ("cache.prefix", "Radix", "radix"),
        ("context_len", "32Ki", 32768),
        ("scheduler.chunk_tokens", "0", 0),
        ("scheduler.overlap", True, "on"),
        ("scheduler.overlap", False, "off"),
        ("scheduler.policy", "dfs-weight", "dfs_weight"),
        ("scheduler.policy", "shortest-prefill-first", "shortest_prefill"),
        ("scheduler.queue_timeout_s", "1.5", 1.5),
        ("scheduler.queue_timeout_s", 2, 2.0),
        ("scheduler.queue_timeout_s", "none", None),
        ("deterministic", "yes", True),
        ("deterministic", "auto", "auto"),
        ("server.access_log", "off", False),
        ("server.api_key", "k", Secret("k")),
        ("server.api_key", "none", None),
        ("server.cors_origins", "a, b", ("a", "b")),
        ("server.cors_origins", '["a"]', ("a",)),
        ("server.cors_origins", ["a"], ("a",)),
        ("lora.adapters", "a=/x,b=/y=z", {"a": "/x", "b": "/y=z"}),
        ("lora.adapters", '{"a": "/x"}', {"a": "/x"}),
        ("dtype", "half", "float16"),
        ("dtype", "bf16", "bfloat16"),
        ("observe.log_level", "WARN", "warning"),
        ("text.tool_parser", "none", None),
        ("text.tool_parser", "hermes", "hermes"),
        ("seed", "-4", -4),
    ],
)
def test_values_are_read(path, raw, value):
    assert value_of(path, raw) == value
    assert type(value_of(path, raw)) is type(value)


@pytest.mark.parametrize(
    ("path", "raw", "words"),
    [
        ("cache.page_size", "0", "int >= 1"),
        ("cache.page_size", "1.5", "int >= 1"),
        ("cache.page_size", True, "int >= 1"),
        ("cache.page_size", None, "int >= 1"),
        ("cache.memory", "1.5", "> 0 < 1"),
        ("cache.memory", "2", ">= 1 KiB"),
        ("cache.prefix", "raddix", "did you mean radix"),
        ("scheduler.queue_timeout_s", "nan", "float > 0"),
        ("scheduler.queue_timeout_s", float("inf"), "float > 0"),
        ("server.port", "65536", "<= 65535"),
        ("server.api_key", 5, "secret"),
        ("server.api_key", "", "not empty"),
        ("server.admin_api_key", " ", "not empty"),
        ("server.access_log", "perhaps", "true | false"),
        ("lora.adapters", "justapath", "name=value"),
        ("server.cors_origins", [1], "list"),
        ("model", 7, "text"),
    ],
)
def test_bad_values_say_what_is_expected(path, raw, words):
    with pytest.raises(ValueError, match="expected") as error:
        value_of(path, raw)

    assert words in str(error.value)


def test_a_bad_secret_is_not_repeated():
    with pytest.raises(ValueError, match="expected") as error:
        value_of("server.api_key", ["sesame"])

    assert "sesame" not in str(error.value)
