"""Encoders, embedders and classifiers on JAX: vectors of the native program (float32)."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.kernels.native.library import describe
from tests.parity.checkpoints import VOCAB
from tests.parity.vectors import ENCODERS, make, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]
NAMES = (
    *(f"{name}-embed" for name in ENCODERS),
    *("clip-text-embed", "embeddinggemma-embed", "eurobert-embed", "qwen3-embed"),
    *("bert-classify", "modernbert-classify", "qwen3-classify"),
)
"""All that attend in both directions; decoders are compared by their tokens."""
OPTIONS = {"device": "jax", "dtype": "float32"}


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_the_native_program(name, tmp_path):
    make(name, tmp_path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (24, 3, 17)]
    pooling = None if name.endswith("classify") else "mean"
    cpu = serve(tmp_path, pooling, runner="program", options={"dtype": "float32"})
    wanted = cpu.embed(prompts)
    cpu.close()
    limits = {"max_batch_tokens": 48, "max_running_reqs": 3}

    jax = serve(tmp_path, pooling, options=OPTIONS, **limits)
    try:
        together = jax.embed(prompts)
        alone = [jax.embed([prompt])[0] for prompt in prompts[1:]]
        assert jax.facts.use()["recompiled"] == 0
    finally:
        jax.close()

    assert min(float(np.abs(vector).max()) for vector in wanted) > 0.01
    np.testing.assert_allclose(together, wanted, atol=1e-5)
    np.testing.assert_allclose(alone, wanted[1:], atol=1e-5)
