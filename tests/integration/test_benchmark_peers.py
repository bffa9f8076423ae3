"""benchmarks/peers/compare.py works from end to end with what every installation has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = ["--new", "4", "--prompt", "8", "--prefill", "16", "--batch", "1", "2"]
TINY += ["--shared", "3", "--shared-prefix", "40"]


def compare(cache: Path, *flags: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks/peers/compare.py"), "--cache", str(cache)]
    command += ["--shapes", "10M", "--formats", "bf16", "--threads", "1", *flags]
    return subprocess.run(
        [*command, *(["--", *words] if words else [])],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=1500,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    done = compare(folder, "--setup", "--peers", "sylvan", "transformers")
    assert done.returncode == 0, done.stderr
    assert (folder / "models" / "10M" / "model.safetensors").exists()
    return folder


def test_both_are_measured_and_what_is_there_is_not_measured_again(cache):
    flags = ("--peers", "sylvan", "transformers", "--rounds", "1")

    done = compare(cache, *flags, words=tuple(TINY))

    assert done.returncode == 0, done.stderr
    assert "| work | sylvan | transformers |" in done.stdout
    for what in ("start to first token", "prefill 16", "shared prefix"):
        assert f"| {what} | " in done.stdout
    assert "Left out" not in done.stdout, done.stdout
    lines = (cache / "results.jsonl").read_text().splitlines()
    jobs = [(r["peer"], r["job"]) for r in map(json.loads, lines)]
    assert jobs == [("sylvan", "measure"), ("sylvan", "shared"), ("transformers", "measure")]
    again = compare(cache, *flags, "--resume", words=tuple(TINY))
    assert again.stdout == done.stdout
    assert (cache / "results.jsonl").read_text().splitlines() == lines


def test_both_answer_alike(cache):
    done = compare(cache, "--check", "--peers", "transformers", "sylvan")

    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("16 answers of [8] tokens, 16 of 16 begin as transformers's do")
    assert int(second.split(" tokens, ")[1].split()[0]) >= 12, second


def test_one_that_takes_too_long_is_left_out_with_its_reason(cache, tmp_path):
    flags = ("--peers", "transformers", "--rounds", "2", "--limit-s", "0.01")

    done = compare(cache, *flags, "--results", str(tmp_path / "r"), words=tuple(TINY))

    assert done.returncode == 0, done.stderr
    assert "- transformers, 10M, bf16, measure, round 1: took longer than 0 s" in done.stdout
    assert "round 2" not in done.stdout
