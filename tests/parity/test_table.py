"""docs/reference/models.md says what the last comparison found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.parity.checkpoints import FAMILIES as BASE
from tests.parity.families import ALL
from tests.parity.vectors import COSINE, VECTORS

ROOT = Path(__file__).parents[2]


def test_page_fits_the_results():
    command = [sys.executable, "scripts/parity_table.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_every_family_was_compared_and_is_equal():
    results = json.loads((ROOT / "tests" / "parity" / "results.json").read_text())

    assert set(results) == {*BASE, *ALL, *VECTORS}
    assert all(row["equal"] and row["difference"] < 1e-4 for row in results.values())
    assert all(row.get("cosine", 1.0) >= COSINE for row in results.values())
