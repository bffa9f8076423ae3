"""Where packed weights are kept when nobody says so."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from sylvan.config import load_cache
from sylvan.config.facts import Facts
from sylvan.config.fields import replaced
from sylvan.config.load_cache import default_directory, file_name, load_cache_dir, may_hold_program
from sylvan.config.resolve import resolve
from sylvan.config.sources import SourceSettings, from_keywords, gather
from sylvan.config.tree import Config
from tests.support.config_facts import make_facts

FOLDER = "/home/user/.cache/sylvan/load"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def facts(**changes: object) -> Facts:
    found = make_facts()
    cpu = dataclasses.replace(found.devices["cpu"], runners=("program", "eager"))
    return dataclasses.replace(found, devices={"cpu": cpu}, **({"load_cache": FOLDER} | changes))


def chosen(known: Facts, **given: object) -> tuple[str | None, str]:
    native = {"attention": "native", "runner": "program"}
    found = resolve(replaced(Config(), native | given), known)
    return found.config.load_cache, found.decisions["load_cache"].reason


def test_the_users_cache_is_taken_if_it_can_be_made(home):
    assert default_directory() == home / "cache/sylvan/load"
    assert not (home / "cache").exists(), "asking makes nothing"

    (home / "cache/sylvan/load").mkdir(parents=True)

    assert default_directory() == home / "cache/sylvan/load"


def test_no_directory_is_taken_where_none_can_be_made(home, monkeypatch):
    (home / "cache").write_text("a file")
    assert default_directory() is None

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54_321)  # a container's user, without an entry

    assert default_directory() is None


def test_programs_of_other_users_are_not_run(home, monkeypatch):
    folder = home / "cache/sylvan/load"
    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr(load_cache, "_ROOT", folder.stat().st_uid + 2)
    assert default_directory() is None

    monkeypatch.setattr(load_cache, "_ROOT", folder.stat().st_uid)

    assert default_directory() == folder, "one that an image brings along"


def test_auto_takes_it_where_weights_are_packed():
    assert chosen(facts()) == (FOLDER, "later starts read what this one writes there")
    assert chosen(facts(load_cache=None)) == (None, "the user's cache directory cannot be used")
    assert chosen(facts(), load_format="dummy") == (None, "the weights are random")
    assert chosen(facts(), runner="eager")[0] is None
    assert chosen(facts(), device="cuda")[0] is None


@pytest.mark.parametrize("given", [None, "/elsewhere"])
def test_what_was_given_stays(given):
    found = resolve(replaced(Config(), {"load_cache": given}), facts())

    assert found.config.load_cache == given
    assert "load_cache" not in found.decisions


@pytest.mark.parametrize("word", ["none", "off", "Off", None])
def test_it_can_be_turned_off(word, tmp_path):
    given = gather(from_keywords({"load_cache": word}), environ={}).config
    assert given.load_cache is None
    assert load_cache_dir(given) is None
    assert not may_hold_program(given)


@pytest.mark.parametrize("text", ["off", "none", "null", "false", "~", "'off'"])
def test_a_file_can_turn_it_off(text, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(f"load_cache: {text}\n")

    assert gather(SourceSettings(), file=str(file), environ={}).config.load_cache is None


def test_a_program_may_be_there_if_its_model_has_one(home):
    folder = home / "cache/sylvan/load"
    config = replaced(Config(), {"model": "/models/[big] model"})
    assert not may_hold_program(config)
    folder.mkdir(parents=True)
    for name in ("[big] model-1.weights", "[big] model.program", "big-2.program"):
        (folder / name).touch()
    assert not may_hold_program(config)

    (folder / file_name(Path(config.model), "0f", ".program")).touch()

    assert may_hold_program(config)
    assert may_hold_program(replaced(config, {"load_cache": str(folder)}))
    assert not may_hold_program(replaced(config, {"load_cache": str(home)}))
    assert not may_hold_program(replaced(config, {"model": "/models/other"}))
