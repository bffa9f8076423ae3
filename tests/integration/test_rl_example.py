"""The example of reinforcement learning: rollouts and trainer agree, and the reward rises."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from sylvan.kernels import describe

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl" / "grpo.py"
STEPS = 8


@pytest.mark.skipif("none" in describe().reasons, reason="kernels are not compiled")
def test_the_reward_rises():
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    sys.modules["grpo"] = example  # whose dataclasses look for it
    try:
        spec.loader.exec_module(example)
        reports = example.run(STEPS)
    finally:
        del sys.modules["grpo"]

    assert [report.version for report in reports] == [
        "default",
        *(f"step-{step}" for step in range(1, STEPS)),
    ]
    assert all(report.exact for report in reports)
    assert max(report.drift for report in reports) < 1e-3
    assert reports[-1].reward > reports[0].reward + 0.2
