"""aider: one run that is not interactive."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import KEY, MODEL, run, step

URL = sys.argv[3]


@step
def one_message():
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "aider"), "--model", f"openai/{MODEL}"]
        command += ["--openai-api-base", f"{URL}/v1", "--openai-api-key", KEY]
        command += ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable"]
        command += ["--no-show-model-warnings", "--map-tokens", "0", "--no-pretty"]
        command += ["--no-suggest-shell-commands", "--edit-format", "ask", "--message", "Hello"]
        settings = Path(folder) / "settings.yml"
        settings.write_text(f"- name: openai/{MODEL}\n  extra_params: {{max_tokens: 16}}\n")
        command += ["--model-settings-file", str(settings)]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert re.search(r"Tokens: \d+ sent, [1-9]\d* received", said), said


run("aider-chat")
