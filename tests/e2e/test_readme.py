"""The README's examples, run as they stand there against a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```(bash|python)\n(.*?)```", README, re.DOTALL)
START_S = 180


@pytest.fixture(scope="module")
def url():
    words = [sys.executable, "-m", "sylvan", "serve", "--port", "0", "--until-eof"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        found = ""
        for line in server.stdout:
            if match := re.search(r"serves \S+ at (\S+) ", line):
                found = match[1]
            if "documentation:" in line:
                break
        assert found, "the server ended before it was ready"
        yield found
        server.stdin.close()
        server.stdout.close()
        assert server.wait(START_S) == 0


def run(kind: str, code: str) -> str:
    words = ["bash", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=START_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(marker: str) -> tuple[str, str]:
    (found,) = [(kind, code) for kind, code in EXAMPLES if marker in code]
    return found


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ("curl -s", "42"),
        ("from openai import OpenAI", "Paris"),
        ("sgl.RuntimeEndpoint", "18"),
    ],
)
def test_example_gets_the_right_answer(url, marker, expected):
    kind, code = example(marker)
    text = run(kind, code.replace("http://127.0.0.1:30000", url))
    if kind == "bash":
        text = json.loads(text)["choices"][0]["message"]["content"]
    assert expected in text


@pytest.mark.slow
def test_engine_example_runs():
    assert run(*example("sylvan.Engine()")).strip()


def test_every_example_is_covered():
    assert len(EXAMPLES) == 4
