"""A sample of families whose layers keep states: every mode equals transformers, in fp32."""

from __future__ import annotations

import pytest

from tests.parity.checkpoints import write
from tests.parity.compare import compare
from tests.parity.rare import RECURRENT


@pytest.mark.parametrize(
    "family", ["lfm2", "jamba", "qwen3-next", pytest.param("kimi-linear", marks=pytest.mark.slow)]
)
def test_recurrent_family_equals_transformers(family, tmp_path):
    model = write(RECURRENT[family](), len(family), tmp_path)

    found = compare(tmp_path, model, new=32)

    assert not found.modes
    assert found.excess <= 1
