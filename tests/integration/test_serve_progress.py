"""`sylvan serve` says how far loading is: a bar on a terminal, else lines of the log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.support.random_model import write_random_model

START_S = 120
FLAGS = ("--device", "cpu", "--threads", "1", "--max-total-tokens", "8Ki", "--port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint in two files."""
    path = write_random_model(tmp_path_factory.mktemp("models") / "tiny")
    tensors = sorted(load_file(path / "model.safetensors").items())
    (path / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for number, part in enumerate((tensors[::2], tensors[1::2]), 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file(dict(part), path / name)
        index |= {key: name for key, _ in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def start(model: Path, *flags: str, stderr: int) -> None:
    """Serve, and stop as soon as it is ready."""
    words = [sys.executable, "-m", "sylvan", "serve", str(model), *FLAGS, *flags]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any("documentation:" in line for line in process.stdout), "it ended before"
        process.send_signal(signal.SIGINT)
        process.wait(START_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(START_S)
        process.stdout.close()


def on_terminal(model: Path, *flags: str) -> str:
    """The output on a terminal."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(ours, 4096):
                shown.append(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        start(model, *flags, stderr=theirs)
    finally:
        os.close(theirs)
        reader.join(START_S)
        os.close(ours)
    return b"".join(shown).decode(errors="replace")


def in_file(model: Path, file: Path, *flags: str) -> str:
    with file.open("w") as log:
        start(model, *flags, stderr=log.fileno())
    return file.read_text()


@pytest.mark.slow
def test_a_log_of_one_process_tells_how_far_loading_is(model, tmp_path):
    text = in_file(model, tmp_path / "log", "--processes", "one")

    lines = re.findall(r"loading weights: (.+) of (.+) \(100 %\)", text)
    assert [done for done, _ in lines] == [total for _, total in lines]
    assert len(lines) == 1


@pytest.mark.slow
def test_a_terminal_shows_a_bar_of_another_process(model):
    text = on_terminal(model, "--processes", "many")

    sizes = re.findall(r"loading \S*tiny.*?([\d.]+)/([\d.]+) kB", text)
    assert any(done == total for done, total in sizes)
    assert "loading weights:" not in text
