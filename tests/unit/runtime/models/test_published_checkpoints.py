"""Much used checkpoints can be served: judged by their config.json, without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sylvan.config.checkpoint import model_facts
from sylvan.kernels import describe
from sylvan.runtime.executor.facts import facts_of
from sylvan.runtime.models.registry import load_config
from tests.support.published_checkpoints import PUBLISHED

ROOT = Path(__file__).parents[4]
POOLED = 0.02  # heads that are not served, such as BERT's pooler


def test_there_are_sixty():
    assert len(PUBLISHED) >= 60


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_as_many_parameters_as_published(name, tmp_path):
    """A matrix that is missing, or of another shape, shows in their number."""
    found = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(found.raw))

    config = load_config(tmp_path)
    facts = facts_of(config, tmp_path)
    planned = model_facts(str(tmp_path))

    assert config.path == "native"
    assert facts.num_parameters / 1e9 == pytest.approx(found.billions, rel=POOLED)
    assert planned.vocab_size == facts.vocab_size
    assert planned.context_len == facts.context_len or not facts.kv_bytes_per_token
    kept = facts.kv_bytes_per_token
    numbers = 4 if facts.dtype == "float32" else 2
    assert planned.kv_per_token >= kept // numbers, "memory is planned for less than a token takes"


@pytest.mark.slow
@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_the_page_is_as_generated():
    command = [sys.executable, "scripts/checkpoint_table.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
