from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sylvan.cli.help import markdown
from sylvan.cli.main import main
from sylvan.config.fields import fields

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "config.md"


@pytest.fixture
def show(capsys, tiny_model):
    def run(*words):
        assert main(["config", str(tiny_model), "--device", "cpu", *words]) == 0
        return capsys.readouterr().out

    return run


def test_every_value_has_an_origin(show):
    rows = {row["path"]: row for row in json.loads(show("--json", "--page-size", "32"))}

    assert rows["cache.page_size"] == {
        "path": "cache.page_size",
        "value": 32,
        "origin": "flag",
        "reason": "--page-size",
    }
    assert rows["server.port"]["origin"] == "default"
    assert rows["scheduler.policy"]["origin"] == "auto"
    assert rows["scheduler.policy"]["reason"]
    absent = {
        "disagg",
        "kv_events",
        "lora",
        "pdmux",
        "speculative",
        "tiers",
    }  # sections that are off have no values
    assert set(rows) == {p for p in fields() if p.partition(".")[0] not in absent}


def test_table_shows_memory_and_notes(show):
    out = show("--skip-server-warmup", "--mem-fraction-static", "0.5")

    assert "cache.memory" in out
    assert "memory: weights" in out
    assert "note: --skip-server-warmup has no effect" in out


@pytest.mark.parametrize("style", ["--json", "--yaml", None])
def test_keys_are_never_shown(show, style):
    out = show("--api-key", "sesame", *([style] if style else []))

    assert "sesame" not in out


def test_yaml_can_be_read_back(show, tmp_path, tiny_model, capsys):
    text = show("--yaml", "--policy", "fcfs", "--kv-memory", "1GiB")
    file = tmp_path / "serve.yaml"
    file.write_text(text)

    assert yaml.safe_load(text)["cache"] == {"memory": 1 << 30}
    assert main(["config", "--config", str(file), "--yaml"]) == 0
    assert capsys.readouterr().out == text


def test_yaml_of_nothing_given_is_an_empty_table(capsys, monkeypatch):
    monkeypatch.delenv("SYLVAN_LOAD_CACHE")
    assert main(["config", "--yaml"]) == 0
    assert capsys.readouterr().out == "{}\n"


def test_reference_page_is_up_to_date():
    assert PAGE.read_text() == markdown(), (
        "run: sylvan config --markdown > docs/reference/config.md"
    )
