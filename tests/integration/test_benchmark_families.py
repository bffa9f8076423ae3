"""benchmarks/models/bench_families.py works from end to end, with sizes of a test."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PARTLY_NATIVE = "lfm2", "qwen3-next"


@pytest.mark.parametrize(
    ("families", "ways"),
    [
        (("llama",), ("native", "fallback", "transformers")),
        (PARTLY_NATIVE, ("native", "plain")),
    ],
    ids=["programs", "partly native"],
)
def test_all_ways_answer(families, ways, tmp_path):
    out = tmp_path / "families.json"
    command = [sys.executable, str(ROOT / "benchmarks/models/bench_families.py"), "--tiny"]
    command += ["--families", *families, "--ways", *ways, "--prompt", "9", "--new", "4"]
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
    assert [row["family"] for row in rows] == [*families]
    assert done.stdout == out.read_text()
    for row in rows:
        assert all(row[f"{way}_runs"] for way in ways)
        for batch in (1, 16, "mixed"):
            assert min(row[f"{way}_{batch}"] for way in ways) > 0
            assert all(
                row[f"{one}_over_{other}_{batch}"] > 0 for one, other in itertools.pairwise(ways)
            )
