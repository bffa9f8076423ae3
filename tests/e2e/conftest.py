"""Real servers in processes of their own, on free loopback ports."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.audits import assert_server_lost_nothing
from tests.support.random_model import write_random_model

START_S = 180


@dataclass
class Server:
    url: str
    name: str
    process: subprocess.Popen[str]
    killed: bool = False

    def kill(self) -> None:
        """End it at once, without a warning."""
        self.killed = True
        self.process.kill()
        self.process.wait(60)


@contextmanager
def running(model: str, *flags: str, port: int = 0) -> Iterator[Server]:
    """`sylvan serve MODEL`; it ends when its standard input does."""
    made: Server | None = None
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        model,
        "--until-eof",
        "--server.port",
        str(port),
    ]
    process = subprocess.Popen(
        [*command, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if found := re.search(r"Sylvan serves (\S+) at (http://\S+)", line):
                made = Server(found[2], found[1], process)
                yield made
                if process.poll() is None:
                    assert_server_lost_nothing(made.url, _key(flags))
                break
        else:
            pytest.fail(f"the server did not start:\n{seen}")
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            code_ = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        process.stdout.close()
    assert code_ == (-signal.SIGKILL if made is not None and made.killed else 0)


def _key(flags: tuple[str, ...]) -> str:
    """Headers with the operator's key."""
    given = dict(itertools.pairwise(flags))
    return given.get("--server.admin-api-key") or given.get("--server.api-key", "")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with random weights: it talks nonsense, but every feature runs."""
    folder = write_random_model(tmp_path_factory.mktemp("random-llama"))
    with running(str(folder), "--server.api-key", "secret") as made:
        yield made


@pytest.fixture(scope="session")
def sapling() -> Iterator[Server]:
    """The built-in model."""
    if not Path(str(files("sylvan") / "assets" / "sapling" / "model.safetensors")).exists():
        pytest.skip("the built-in model has no weights yet")
    with running("sapling", "--server.api-key", "secret") as made:
        yield made
