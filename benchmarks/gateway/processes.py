"""Starts servers and gateways as processes, for the benchmarks of this folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CODE = "import sys; from sylvan.cli import main; sys.exit(main())"
SERVES = re.compile(r"Sylvan serves \S+ at (http://\S+)")
ROUTES = re.compile(r"Sylvan routes to .* at (http://\S+)")
VOCAB = 512


@dataclass
class Running:
    """A process that serves."""

    process: subprocess.Popen[str]
    url: str

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def begin(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *words, "--until-eof"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def url_of(process: subprocess.Popen[str], pattern: re.Pattern[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := pattern.search(line):
            return found[1]
    raise SystemExit(f"it did not start: {' '.join(map(str, process.args[3:]))}")


def start(words: Sequence[str], pattern: re.Pattern[str] = SERVES) -> Running:
    process = begin(words)
    return Running(process, url_of(process, pattern))


@contextmanager
def servers(model: str, count: int, *flags: str) -> Iterator[list[Running]]:
    """Start several servers of a model together."""
    begun = [begin(["serve", model, "--port", "0", *flags]) for _ in range(count)]
    made = [Running(process, "") for process in begun]
    try:
        for server in made:
            server.url = url_of(server.process, SERVES)
        yield made
    finally:
        for server in made:
            server.end()


@contextmanager
def gateway(urls: Sequence[str], *flags: str, cores: Sequence[int] = ()) -> Iterator[Running]:
    """Start `sylvan route` in front of servers, pinned to cores if any are given."""
    quick = ("--observe.metrics-port", "none", "--port", "0")
    made = start(["route", "--worker-urls", *urls, *quick, *flags], ROUTES)
    if cores:
        os.sched_setaffinity(made.process.pid, cores)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def dummy_model(hidden: int, layers: int, context: int) -> Iterator[str]:
    """A checkpoint without weights (`--load-format dummy`) whose tokens are bytes."""
    from tests.support.tiny import MODEL, write_model

    with tempfile.TemporaryDirectory() as made:
        folder = write_model(Path(made) / "dummy")
        heads = max(2, hidden // 64)
        config = {
            **MODEL,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "max_position_embeddings": context,
        }
        (folder / "config.json").write_text(json.dumps(config))
        yield str(folder)
