"""docs/reference/models.md says what the last comparison found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sylvan.config.checkpoint import model_facts
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import DTYPE_BYTES, kv_bytes_per_token
from sylvan.runtime.models.registry import MODELS, load_config
from sylvan.runtime.models.unsupported import UNSUPPORTED
from tests.parity.checkpoints import FAMILIES as BASE
from tests.parity.left import LEFT
from tests.parity.published_blocks import FILLING, WHOLE
from tests.parity.published_models import PUBLISHED
from tests.parity.rare import ALL
from tests.parity.reading import READING
from tests.parity.vectors import COSINE, VECTORS

ROOT = Path(__file__).parents[2]


def test_page_fits_the_results():
    command = [sys.executable, "scripts/parity_table.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_every_family_can_be_started(tmp_path):
    """Sizes that memory is planned by are found in the spelling of every family."""
    for name, make in ALL.items():
        config = make()
        config.save_pretrained(tmp_path / name)

        facts = model_facts(str(tmp_path / name))

        text = config.get_text_config()
        assert (facts.vocab_size, facts.causal) == (text.vocab_size, True), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_family_can_be_started(name, tmp_path):
    raw = PUBLISHED[name].raw
    (tmp_path / "config.json").write_text(json.dumps(raw))

    facts = model_facts(str(tmp_path))

    served = load_config(tmp_path)
    assert facts.vocab_size == served.vocab_size
    assert facts.context_len == served.max_position_embeddings
    assert facts.kv_per_token >= kv_bytes_per_token(served) // DTYPE_BYTES[served.dtype]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refusals_say_why(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))

    reason = re.escape(UNSUPPORTED[name])
    with pytest.raises(ConfigError, match=f"{name} cannot be served: {reason}"):
        load_config(tmp_path)

    assert name not in MODELS


def test_every_family_was_compared_and_is_equal():
    results = json.loads((ROOT / "tests" / "parity" / "results.json").read_text())

    assert set(results) == {*BASE, *ALL, *VECTORS, *PUBLISHED, *READING, *FILLING, *WHOLE}
    assert all(row["equal"] for row in results.values())
    for name, row in results.items():
        if name in VECTORS:
            assert row["difference"] < 1e-4, name
            assert row["cosine"] >= COSINE, name
        elif name not in FILLING and name not in WHOLE:
            assert row["excess"] <= 1, name


def test_native_families_are_step_programs():
    results = json.loads((ROOT / "tests" / "parity" / "results.json").read_text())

    eager = {
        name
        for name, row in results.items()
        if row.get("path") == "native" and row["runner"] == "eager"
    }

    assert not eager


def test_every_causal_model_of_transformers_is_listed():
    results = json.loads((ROOT / "tests" / "parity" / "results.json").read_text())
    there: set[str] = set()
    for found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        there |= {found} if isinstance(found, str) else set(found)
    served = {row["architecture"] for row in results.values()}

    assert there <= served | set(LEFT)
    assert not served & (set(LEFT) | set(UNSUPPORTED))
    generating = {row["architecture"] for row in results.values() if "cosine" not in row}
    native = {
        row["architecture"]
        for row in results.values()
        if "cosine" not in row and row["path"] == "native"
    }
    assert len(generating) >= 160
    assert len(native) >= 120
