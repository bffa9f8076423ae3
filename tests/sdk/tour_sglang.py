"""SGLang's own package: its frontend language, and its load test, against a server of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import sglang as sgl
from steps import KEY, run, step

URL = sys.argv[1]


@sgl.function
def capital(s, country):
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))
    s += sgl.user("Is that so?")
    s += sgl.assistant(sgl.select("sure", ["yes", "no"]))


@step
def programs_run():
    backend = sgl.RuntimeEndpoint(URL, api_key=KEY)
    states = [capital.run(country="Italy", backend=backend, stream=s) for s in (False, True)]
    plain, streamed = (state["answer"] for state in states)
    assert plain == streamed
    assert all(state["sure"] in ("yes", "no") for state in states)


@step
def the_load_test_runs():
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
        command += ["--base-url", URL, "--dataset-name", "random-ids", "--num-prompts", "6"]
        command += ["--random-input-len", "32", "--random-output-len", "8"]
        command += ["--output-file", str(out)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "API_KEY": KEY, "OPENAI_API_KEY": KEY},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(out.read_text().splitlines()[-1])
        assert found["completed"] == 6, found
        assert found["mean_ttft_ms"] > 0


run("sglang")
