"""benchmarks/gpu/run.py works from end to end: on a CPU, with sizes of a test."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECTIONS = {
    "machine",
    "kernel",
    "check",
    "engine",
    "decode",
    "prefill",
    "ablation",
    "prompts",
    "start",
    "peer",
}


def run(tmp_path: Path, *flags: str) -> tuple[str, dict]:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu/run.py"), *flags, "--out", str(out)]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text())


def test_every_part_runs_and_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    printed, report = run(tmp_path, "--device", "cpu", "--tiny", "--minutes", "20")

    assert report["failed"] == []
    assert report["skipped"] == []
    rows = report["rows"]
    assert {row["section"] for row in rows} == SECTIONS
    assert all(math.isfinite(row["value"]) and row["value"] > 0 for row in rows)
    for row in rows:
        assert row["what"] in printed
        if row["section"] in ("kernel", "decode", "prefill"):
            assert row["share"] == pytest.approx(row["floor"] / row["value"])
    checks = {row["what"]: (row["value"], row["unit"]) for row in rows if row["section"] == "check"}
    equal = [value for what, value in checks.items() if "transformers" in what]
    assert equal == [(3.0, "of 3")] * 2
    assert checks["steps launched without waiting"][0] == 1.0
    errors = [row["note"] for row in rows if row["section"] == "kernel"]
    assert len(errors) > 15
    assert not [note for note in errors if "WRONG" in note or "nan" in note]


def test_parts_that_no_time_is_left_for_are_named(tmp_path: Path) -> None:
    printed, report = run(tmp_path, "--device", "cpu", "--tiny", "--minutes", "0")

    assert {row["section"] for row in report["rows"]} == {"machine"}
    assert report["failed"] == []
    assert "peer: needs 1 s, 0 s left" in report["skipped"]
    assert all(f"skipped: {name}" in printed for name in report["skipped"])
