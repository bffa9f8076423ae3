"""SGLang's own package: its frontend language and its benchmark, against a server of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import sglang as sgl
from steps import KEY, MODEL, run, step

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


BENCH = """
import sys, types
# All that the benchmark takes of the server's half, whose imports have no wheels for CPUs.
half = types.ModuleType("sglang.srt.disaggregation.utils")
half.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
sys.modules[half.__name__] = half
from sglang.benchmark.serving import cli_main
cli_main()
"""


@step
def bench_serving_counts_as_we_do():
    tokenizer = Path(__file__).parents[2] / "src" / "sylvan" / "assets" / "sapling"
    sizes = ("--random-input-len", "16", "--random-output-len", "8", "--random-range-ratio", "1")
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.jsonl"
            command = [sys.executable, "-c", BENCH, "--backend", backend, "--base-url", URL]
            command += ["--model", MODEL, "--tokenizer", str(tokenizer), "--num-prompts", "8"]
            command += ["--dataset-name", "random-ids", *sizes, "--output-file", str(report)]
            keyed = {**os.environ, "OPENAI_API_KEY": KEY, "API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                command, env=keyed, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
            found = json.loads(report.read_text().splitlines()[-1])
        assert found["completed"] == 8, (backend, done.stdout[-2000:])
        assert found["total_output_tokens"] == 64, (backend, found)


run("sglang")
