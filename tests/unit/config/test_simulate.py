from __future__ import annotations

import re
from pathlib import Path

import pytest

import sylvan
from sylvan.config.flags import parse_flags
from sylvan.config.schema import SIMULATE
from sylvan.config.sources import gather_as
from sylvan.protocol.errors import ConfigError

PACKAGE = Path(sylvan.__file__).parent


def read(*words, environ=None):
    parsed = parse_flags(words, tree=SIMULATE)
    return gather_as(SIMULATE, parsed.given, environ=environ or {}).config


@pytest.mark.parametrize("path", SIMULATE.fields)
def test_every_field_is_documented(path):
    assert SIMULATE.fields[path].doc.endswith(".")


def test_every_field_is_read():
    files = [*(PACKAGE / "sim").rglob("*.py"), PACKAGE / "cli/simulate.py"]
    files += [PACKAGE / "bench/simulated.py", *(PACKAGE / "bench/datasets").glob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    leaves = {path.rpartition(".")[2] for path in SIMULATE.fields}
    assert {leaf for leaf in leaves if not re.search(rf"\.{leaf}\b", text)} == set()


@pytest.mark.parametrize("name", SIMULATE.aliases)
def test_alias_targets_exist_and_are_not_fields(name):
    assert SIMULATE.aliases[name].target in SIMULATE.fields
    assert name not in SIMULATE.fields


def test_a_command_line_is_understood():
    config = read(
        *("--trace", "t.jsonl", "--model-profile", "p.json", "--replicas", "1,2,4"),
        *("--cache-tokens", "16k,64Ki", "--policy", "cache_aware,random", "--slo", "ttft=500"),
    )

    assert (config.data.dataset, config.data.path, config.load.timestamps) == (
        "trace", "t.jsonl", True,
    )  # fmt: skip
    assert (config.sim.profile, config.sim.replicas) == ("p.json", (1, 2, 4))
    assert config.sim.cache_tokens == (16000, 65536)
    assert config.sim.policies == ("cache_aware", "random")
    assert config.sim.slo == {"ttft": "500"}


def test_variables_are_settings():
    assert read(environ={"SYLVAN_SIMULATE_SIM__REPLICAS": "3,5"}).sim.replicas == (3, 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "0"), "replicas.* 1"),
        (("--replicas", "5000"), "replicas.* 4096"),
        (("--cache-tokens", "no"), "cache-tokens"),
        (("--share", "2"), "share.* 1"),
        (("--jobs", "0"), "jobs.* 1"),
    ],
)
def test_wrong_values_name_the_setting_and_its_limit(words, message):
    with pytest.raises(ConfigError, match=message):
        read(*words)
