from __future__ import annotations

import pytest

from sylvan.config.fields import fields
from sylvan.config.flags import CONFIG_OPTIONS, Option, parse_flags
from sylvan.config.load import load
from sylvan.protocol.errors import ConfigError

OPTIONS = (*CONFIG_OPTIONS, Option("json", "Print JSON."), Option("help", "Help.", short="h"))


def read(line, **kwargs):
    return parse_flags(line.split(), OPTIONS, **kwargs)


def config_of(line):
    return load(read(line).given.settings).config


@pytest.mark.parametrize("path", fields())
def test_every_field_is_a_flag(path):
    sample = {"deterministic": "on", "lora.adapters": "a=b"}.get(path)
    words = next((w for w in fields()[path].choices if w != "auto"), None)
    value = sample or words or ("true" if fields()[path].is_switch else "1024")

    parsed = read(f"{fields()[path].flag}={value}")

    assert [s.path for s in parsed.given.settings] == [path]


def test_words_options_and_settings_are_distinguished():
    parsed = read("a --port 5 --json b --config f.yaml -h --seed=-3")

    assert parsed.positions == ["a", "b"]
    assert parsed.options == {"json": "", "config": "f.yaml", "help": ""}
    assert {s.path: s.value for s in parsed.given.settings} == {"server.port": "5", "seed": "-3"}


@pytest.mark.parametrize(
    ("line", "value", "positions"),
    [
        ("--deterministic", True, []),
        ("--deterministic m", True, ["m"]),
        ("--deterministic off", False, []),
        ("--deterministic auto m", "auto", ["m"]),
        ("--deterministic=no", False, []),
    ],
)
def test_a_switch_takes_the_next_word_only_if_it_is_its_value(line, value, positions):
    assert config_of(line).deterministic == value
    assert read(line).positions == positions


def test_a_negative_number_is_a_value():
    assert config_of("--seed -3").seed == -3


def test_two_dashes_end_the_flags():
    assert read("-- --port").positions == ["--port"]


def test_all_unknown_flags_are_reported_with_the_nearest():
    with pytest.raises(ConfigError) as error:
        read("--prot 3 --cache.page-siz 4 --max-tokens 4 --zzzz --port")

    lines = str(error.value).splitlines()
    assert "--prot: unknown flag (did you mean --port?)" in lines
    assert "--cache.page-siz: unknown flag (did you mean --cache.page-size?)" in lines
    assert "--max-tokens: unknown flag (did you mean --cache.max-tokens?)" in lines
    assert "--zzzz: unknown flag" in lines
    assert "--port needs a value" in lines


def test_an_option_that_takes_no_value_refuses_one():
    with pytest.raises(ConfigError, match="--json takes no value"):
        read("--json=1")


def test_without_the_tree_only_options_are_flags():
    with pytest.raises(ConfigError, match=r"--jsn: unknown flag \(did you mean --json\?\)"):
        read("--jsn", tree=None)


def test_a_value_is_not_taken_from_the_next_flag():
    with pytest.raises(ConfigError, match="--port needs a value"):
        read("--port --host")
