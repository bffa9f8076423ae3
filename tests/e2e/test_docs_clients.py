"""The examples of pages in docs/ against a real server: every block of `sh` or `python`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import running

ROOT = Path(__file__).parents[2]
PAGES = ("getting-started", "concepts/radix-cache", "howto/clients")
BLOCKS = [
    (page, number, kind, code)
    for page in PAGES
    for number, (kind, code) in enumerate(
        re.findall(
            r"```(sh|python)\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL
        )
    )
]
README = (ROOT / "README.md").read_text()  # what stands there too runs in test_readme.py


def commands(code):
    """One command after another; a quoted text or a backslash continues in the next line."""
    lexer = shlex.shlex(code.replace("\\\n", " "), posix=True, punctuation_chars="\n")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words = []
    for word in [*lexer, "\n"]:
        if word.strip("\n"):
            words.append(word)
        elif words:
            yield words
            words = []


@pytest.fixture(scope="module")
def sapling_vision():
    with running("sapling-vision", "--server.api-key", "secret") as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code"),
    [(kind, code) for _, _, kind, code in BLOCKS if code not in README],
    ids=[f"{page}-{number}-{kind}" for page, number, kind, code in BLOCKS if code not in README],
)
def test_example_runs(request, kind, code):
    needed = "sapling_vision" if 'model="sapling-vision"' in code else "server"
    server = request.getfixturevalue(needed)
    code = code.replace("http://127.0.0.1:30000", server.url).replace('"none"', '"secret"')
    if kind == "python":
        assert run([sys.executable, "-c", code]).strip()
        return
    for words in commands(code):
        if words[0] == "curl":
            more = ["--fail-with-body", "-sS", "-H", "Authorization: Bearer secret"]
            assert run([*words, *more]).strip()
        else:
            assert words[0] == "sylvan"
            run([sys.executable, "-m", *words])


def run(words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
