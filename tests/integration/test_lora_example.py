"""The example of adapters: what was trained is served, beside the base model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora" / "finetune.py"
pytest.importorskip("peft")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # peft's own, about transformers and torch
def test_the_adapter_says_what_it_was_taught(tmp_path):
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    sys.modules["finetune"] = example  # whose dataclasses look for it
    try:
        spec.loader.exec_module(example)
        report = example.run(30, tmp_path)
    finally:
        del sys.modules["finetune"]

    answers = list(example.FACTS.values())
    assert all(text.startswith(want) for text, want in zip(report.tuned, answers, strict=True))
    assert not any(text.startswith(want) for text, want in zip(report.base, answers, strict=True))
    assert report.drift < 1e-3
