"""The benchmarks of the gateway work from end to end, with sizes of a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(name, *words):
    command = [sys.executable, str(ROOT / "benchmarks/gateway" / name), *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shared_prefixes_are_counted():
    sizes = ("--hidden", 64, "--layers", 1, "--system", 512, "--output", 1, "--cache", 2048)
    out = run("bench_shared_prefix.py", "--workers", 2, "--groups", 4, "--per-group", 6, *sizes)
    [hit_rate] = re.findall(r"hit rate ([0-9.]+)x", out)
    assert float(hit_rate) > 1.0


def test_no_stream_is_lost_when_servers_are_killed():
    sizes = ("--workers", 3, "--streams", 4, "--tokens", 200, "--seconds", 6, "--every", 2)
    out = run("bench_failover.py", *sizes)
    assert re.search(r"100\.0% of [1-9][0-9]* streams identical", out)


def test_overhead_is_measured():
    sizes = ("--seconds", 0.3, "--rate", 50, "--concurrency", 1, 4)
    out = run("bench_overhead.py", "--processes", 2, *sizes)
    assert "2 procs  adds to stream at 50/s" in out
    assert "sylvan   adds to stream at 50/s" in out
    assert '"failures": 0' in out
    assert not re.search(r'"failures": [1-9]', out)
