"""Models of transformers whose matrix products and attention are native, as on a CPU server."""

from __future__ import annotations

import pytest
import transformers

from sylvan.kernels.native.library import describe
from sylvan.runtime.models import registry
from tests.parity.checkpoints import SHAPE, write
from tests.parity.compare import compare
from tests.parity.families import DENSE, EXPERT, FALLBACK
from tests.parity.rare import RARE
from tests.parity.serving import Serving
from tests.parity.test_families import TOLERANCE

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
KERNELS = "eager (native linears and attention"
WHAT = {
    "rotary, grouped heads": lambda: transformers.LlamaConfig(**SHAPE),
    "tied, windows, soft caps": DENSE["gemma2"],
    "sinks": EXPERT["gpt-oss"],
    "norms of heads": FALLBACK["cohere-qk-norm"],
    "joined projections": FALLBACK["persimmon"],
    "learned positions": DENSE["opt"],
    "scaled embedding": RARE["bart"],
    "heads twice as wide": RARE["diffllama"],
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


@pytest.mark.parametrize(
    ("options", "runner"),
    [
        ({"attention": "torch"}, "eager (native linears,"),
        ({"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"}, "eager (native linears,"),
        ({"dtype": "bfloat16"}, KERNELS),
        ({"page_size": 8}, "eager (native linears,"),
    ],
)
def test_native_attention_gives_way_to_what_was_chosen(options, runner, tmp_path):
    write(FALLBACK["persimmon"](), 3, tmp_path)
    page = options.pop("page_size", 16)

    serving = Serving(tmp_path, runner="auto", page_size=page, options=options)

    assert serving.facts.runner.startswith(runner)
    assert serving.generate([[5, 6, 7]], max_new_tokens=4)
