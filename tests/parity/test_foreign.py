"""Models of transformers whose matrix products and attention are native, as on a CPU server."""

from __future__ import annotations

import pytest
import transformers

from sylvan.kernels.native.library import describe
from sylvan.runtime.models import registry
from tests.parity.checkpoints import SHAPE, write
from tests.parity.compare import compare
from tests.parity.families import DENSE, EXPERT, FALLBACK
from tests.parity.test_families import TOLERANCE

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
KERNELS = "eager (native linears and attention"
WHAT = {
    "rotary, grouped heads": lambda: transformers.LlamaConfig(**SHAPE),
    "tied, windows, soft caps": DENSE["gemma2"],
    "sinks": EXPERT["gpt-oss"],
    "norms of heads": FALLBACK["cohere-qk-norm"],
    "joined projections": FALLBACK["persimmon"],
}


@pytest.fixture(autouse=True)
def as_in_a_server(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.mark.parametrize("what", WHAT)
def test_it_equals_transformers(what, tmp_path, monkeypatch):
    config = WHAT[what]()
    model = write(config, len(what), tmp_path)
    monkeypatch.delitem(registry.MODELS, model.config.architectures[0], raising=False)

    found = compare(tmp_path, model, new=32)

    assert found.runner.startswith(KERNELS)
    assert not found.modes
    assert found.logprob < TOLERANCE
