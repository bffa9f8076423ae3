from __future__ import annotations

import json

import pytest

from sylvan.config import env
from sylvan.config.sources import PRESETS, SourceSettings, from_keywords, gather, read_file
from sylvan.config.tree import CacheConfig, Config
from sylvan.protocol.errors import ConfigError


def keywords(**values):
    return gather(from_keywords(values), environ={}).config


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "model: m\ncache: {page_size: 8}\nscheduler:\n  overlap: off\n"),
        ("a.yml", "model: m\ncache:\n  page-size: 8\nscheduler: {overlap: off}\n"),
        ("a.json", '{"model": "m", "cache": {"page_size": 8}, "scheduler": {"overlap": "off"}}'),
        ("a.toml", 'model = "m"\n[cache]\npage_size = 8\n[scheduler]\noverlap = "off"\n'),
        ("a.conf", "model-path: m\npage-size: 8\ndisable-overlap-schedule: true\n"),
    ],
)
def test_files_of_all_kinds_are_read(tmp_path, name, text):
    config = gather(SourceSettings(), file=str(written(tmp_path, name, text)), environ={}).config

    assert (config.model, config.cache.page_size, config.scheduler.overlap) == ("m", 8, "off")


def test_an_empty_file_gives_nothing(tmp_path):
    assert read_file(written(tmp_path, "a.yaml", "# nothing\n")) == SourceSettings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "expected a table"),
        ("a: [\n", "cannot read"),
        ("cache: {pagesize: 8}\n", r"unknown field.*did you mean cache\.page_size"),
        ("modell: m\n", "did you mean model"),
        ("attn_cp_size: 4\n", "context and attention parallelism"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, words):
    path = written(tmp_path, "bad.yaml", text)

    with pytest.raises(ConfigError, match=words) as error:
        gather(SourceSettings(), file=str(path), environ={})

    assert "bad.yaml" in str(error.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        gather(SourceSettings(), file=str(tmp_path / "none.yaml"), environ={})


def test_precedence_runs_from_preset_to_given(tmp_path):
    file = written(tmp_path, "a.json", json.dumps({"runner": "program", "processes": "many"}))
    environ = {"SYLVAN_PROCESSES": "one", "SYLVAN_SEED": "5", "SYLVAN_PRESET": "debug"}

    loaded = gather(from_keywords({"seed": 7}), file=str(file), environ=environ)

    assert loaded.config.observe.log_level == "debug"  # preset
    assert loaded.config.runner == "program"  # file over preset
    assert loaded.config.processes == "one"  # environment over file
    assert loaded.config.seed == 7  # keyword over environment
    assert loaded.given["runner"].spelled.startswith("runner in ")


def test_the_environment_may_name_the_file(tmp_path):
    file = written(tmp_path, "a.yaml", "seed: 3")

    assert gather(SourceSettings(), environ={"SYLVAN_CONFIG": str(file)}).config.seed == 3


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load(name):
    assert gather(SourceSettings(), preset=name, environ={}).config != Config()


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="did you mean debug"):
        gather(SourceSettings(), preset="debgu", environ={})


def test_unknown_variables_are_refused():
    with pytest.raises(ConfigError, match="did you mean SYLVAN_CACHE__PAGE_SIZE"):
        env.read({"SYLVAN_CACHE_PAGE_SIZE": "3", "OTHER": "x"})


def test_variables_set_secrets_and_sections():
    environ = {"SYLVAN_SERVER__API_KEY": "k", "SYLVAN_LORA": "on"}
    config = gather(SourceSettings(), environ=environ).config

    assert config.server.api_key.reveal() == "k"
    assert config.lora is not None


def test_keywords_take_paths_sections_and_aliases():
    assert keywords(cache__page_size=4).cache.page_size == 4
    assert keywords(cache={"page_size": 4}).cache.page_size == 4
    assert keywords(cache=CacheConfig(page_size=4)).cache == CacheConfig(page_size=4)
    assert keywords(model_path="m", mem_fraction_static=0.5).cache.memory == 0.5
    assert keywords(disable_radix_cache=True).cache.prefix == "none"
    assert keywords(disable_radix_cache=False).cache.prefix == "radix"


def test_unknown_keywords_suggest_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean cache\.page_size"):
        keywords(cache__pagesize=4)
    with pytest.raises(ConfigError, match="did you mean model_path"):
        keywords(model_pth="m")
