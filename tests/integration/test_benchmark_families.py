"""benchmarks/models/bench_families.py works from end to end, with sizes of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_three_ways_answer(tmp_path):
    out = tmp_path / "families.json"
    command = [sys.executable, str(ROOT / "benchmarks/models/bench_families.py"), "--tiny"]
    command += ["--families", "llama", "--prompt", "9", "--new", "4"]
    command += ["--requests", "18"]

    done = subprocess.run(
        [*command, "--repeats", "1", "--output", str(out)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=1500,
    )

    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["family"] for row in rows] == ["llama"]
    assert done.stdout == out.read_text()
    for row in rows:
        assert row["fallback_runs"] == "eager"
        for batch in (1, 16, "mixed"):
            assert min(row[f"{way}_{batch}"] for way in ("native", "fallback", "transformers")) > 0
            assert row[f"native_over_fallback_{batch}"] > 0
            assert row[f"fallback_over_transformers_{batch}"] > 0
