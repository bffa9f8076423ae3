from __future__ import annotations

import pytest

from sylvan.config.load import Setting, dump, flatten, load
from sylvan.config.tree import Config, LoraConfig, ServerConfig
from sylvan.config.values import Secret
from sylvan.protocol.errors import ConfigError


def setting(path, value, origin="flag"):
    return Setting(path, value, origin, f"--{path}")


def test_nothing_given_is_all_defaults():
    loaded = load([])

    assert loaded.config == Config()
    assert loaded.given == {}


def test_later_sources_win_and_are_remembered():
    loaded = load(
        [
            setting("cache.page_size", 8, "preset"),
            setting("cache.page_size", 16, "file"),
            setting("cache.eviction", "lfu", "file"),
            setting("cache.page_size", "32", "environment"),
            setting("cache.page_size", "64", "flag"),
        ]
    )

    assert loaded.config.cache.page_size == 64
    assert loaded.given["cache.page_size"].origin == "flag"
    assert loaded.given["cache.eviction"].origin == "file"


def test_one_source_may_not_contradict_itself():
    with pytest.raises(ConfigError, match=r"contradicts --cache\.page_size"):
        load([setting("cache.page_size", 8), setting("cache.page_size", "16")])

    assert load([setting("cache.page_size", 8)] * 2).config.cache.page_size == 8


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        load([setting("cache.pagesize", 1), setting("server.port", -1), setting("model", "m")])

    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert "did you mean cache.page_size?" in lines[0]
    assert "--server.port" in lines[1]


def test_a_section_turns_on_by_its_fields_or_as_a_whole():
    assert load([setting("lora.max_rank", 4)]).config.lora == LoraConfig(max_rank=4)
    assert load([setting("lora", {})]).config.lora == LoraConfig()
    assert load([setting("lora", "true")]).config.lora == LoraConfig()


def test_a_later_none_turns_a_section_off():
    loaded = load([setting("lora.max_rank", 4, "file"), setting("lora", "none")])

    assert loaded.config.lora is None
    assert "lora.max_rank" not in loaded.given


def test_a_later_field_turns_a_section_on_again():
    loaded = load([setting("lora", None, "file"), setting("lora.max_rank", "4")])

    assert loaded.config.lora == LoraConfig(max_rank=4)


@pytest.mark.parametrize(
    ("path", "value"), [("lora", "x"), ("cache", None), ("cache", 5), ("cache", "true")]
)
def test_a_section_takes_no_value(path, value):
    with pytest.raises(ConfigError, match="is a section"):
        load([setting(path, value)])


def test_required_fields_of_a_section_are_named():
    with pytest.raises(ConfigError, match=r"speculative also needs speculative\.algorithm"):
        load([setting("speculative.num_steps", 2)])


def test_flatten_keeps_tables_that_are_values():
    tree = {"cache": {"page-size": 4}, "lora": {"adapters": {"a": "b"}}, "disagg": {}}

    assert dict(flatten(tree)) == {
        "cache.page_size": 4,
        "lora.adapters": {"a": "b"},
        "disagg": {},
    }


def test_dump_leaves_out_secrets_and_absent_sections():
    tree = dump(Config(server=ServerConfig(api_key=Secret("sesame"), port=5)))

    assert tree["server"]["port"] == 5
    assert "api_key" not in tree["server"]
    assert "lora" not in tree


def test_dump_without_defaults_is_what_was_given():
    loaded = load([setting("cache.memory", "2GiB"), setting("model", "m")])

    assert dump(loaded.config, defaults=False) == {"model": "m", "cache": {"memory": 2 << 30}}
