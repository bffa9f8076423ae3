from __future__ import annotations

import json
import logging
import sys

import pytest

from sylvan.utils import logs


@pytest.fixture(autouse=True)
def _restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_lines_go_to_stderr(capsys):
    logs.set_up("info")

    logging.getLogger("sylvan.x").info("started rid=%s", "r1")
    logging.getLogger("sylvan.x").debug("hidden")

    err = capsys.readouterr().err
    assert err.endswith("INFO sylvan.x: started rid=r1\n")


def test_json_lines_hold_the_error(capsys):
    logs.set_up("warning", "json")

    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("sylvan.x").warning("failed", exc_info=sys.exc_info())

    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"], line["message"]) == ("warning", "sylvan.x", "failed")
    assert "ValueError: broken" in line["error"]


def test_libraries_are_quiet_below_warnings(capsys):
    logs.set_up("debug")

    logging.getLogger("httpx").info("chatter")
    logging.getLogger("httpx").warning("trouble")

    err = capsys.readouterr().err
    assert "chatter" not in err
    assert "trouble" in err


def test_a_level_that_somebody_set_stays_until_the_configured_one_changes():
    root = logging.getLogger()
    level = logs.LogLevel("info")
    root.setLevel("DEBUG")

    level.change("info")
    assert root.level == logging.DEBUG
    level.change("error")
    assert root.level == logging.ERROR
