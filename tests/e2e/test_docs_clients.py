"""The examples of docs/howto/clients.md against a real server."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "clients.md"
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("kind", "code"), BLOCKS, ids=[f"{k}-{i}" for i, (k, _) in enumerate(BLOCKS)]
)
def test_example_runs(server, kind, code):
    code = code.replace("http://127.0.0.1:30000", server.url).replace('"none"', '"secret"')
    if kind == "python":
        command = [sys.executable, "-c", code]
    else:
        command = shlex.split(code.replace("\\\n", " "))
        command += ["--fail-with-body", "-sS", "-H", "Authorization: Bearer secret"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
