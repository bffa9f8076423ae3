"""`sylvan simulate` with what a real server recorded while `sylvan bench serve` asked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sylvan.sim.replay import follow
from tests.e2e.conftest import running
from tests.support.random_model import write_random_model

CODE = "import sys; from sylvan.cli import main; sys.exit(main())"


def sylvan(*words):
    command = [sys.executable, "-c", CODE, *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with a recording and the results of the load test that was its cause."""
    folder = tmp_path_factory.mktemp("measured")
    model = write_random_model(folder / "model")
    with running(str(model), "--record", str(folder / "flight")) as server:
        done = sylvan(
            "bench", "serve", "--url", server.url, "--dataset-name", "shared-prefix",
            "--gsp-num-groups", 4, "--gsp-prompts-per-group", 10, "--gsp-system-prompt-len", 96,
            "--gsp-question-len", 16, "--gsp-output-len", 12, "--rate", 20,
            "--output", folder / "runs.jsonl", "--output-details",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_replica_takes_the_steps_of_the_server(measured):
    followed = follow(measured / "flight" / "run-1")

    assert followed.difference == ""
    assert followed.requests == 41  # and the one that warms up


@pytest.mark.slow
def test_a_simulation_is_compared_with_the_server(measured, tmp_path):
    profile, html = tmp_path / "profile.json", tmp_path / "report.html"
    flight, runs = measured / "flight", measured / "runs.jsonl"

    fitted = sylvan("simulate", "fit", flight, "--results", runs, "-o", profile)
    assert fitted.returncode == 0, fitted.stderr
    assert "outside the scheduler" in fitted.stdout

    words = ("simulate", "--model-profile", profile, "--against", runs, "--html", html)
    once = sylvan(*words, "--output", tmp_path / "sim.jsonl")
    assert once.returncode == 0, once.stderr
    assert "median_ttft_ms" in once.stdout
    [line] = map(json.loads, (tmp_path / "sim.jsonl").read_text().splitlines())
    [real] = map(json.loads, runs.read_text().splitlines())
    # times depend on the machine that runs this; what does not is exact
    for name in ("completed", "total_input_tokens", "total_output_tokens"):
        assert line[name] == real[name]
    assert line["total_cached_tokens"] > 0.5 * real["total_cached_tokens"]
    assert set(line["errors_against"]) >= {"request_throughput", "median_ttft_ms", "p99_ttft_ms"}
    assert "Time to first token" in html.read_text()
    assert sylvan(*words).stdout == once.stdout
