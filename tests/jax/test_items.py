"""Models that attend to encoded items: Whisper on JAX gives the texts of transformers."""

from __future__ import annotations

import pytest

from sylvan.kernels.native.library import describe
from tests.parity.test_whisper import Ears

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]
OPTIONS = {"device": "jax", "dtype": "float32", "max_samples": 0}


@pytest.mark.parametrize("devices", [1, 2])
def test_texts_are_those_of_transformers(devices, tmp_path):
    ears = Ears(tmp_path)
    expected = ears.expected()
    limits = {"max_batch_tokens": 32, "max_running_reqs": 2, "chunk_tokens": 2}
    options = OPTIONS | {"devices": devices}
    serving, control = ears.serving(runner="auto", options=options, **limits)
    try:
        assert ears.answers(serving, "cold") == expected
        assert control.counts.encoded == 3  # sounds, of which two have a slot at a time
        assert ears.answers(serving, "warm") == expected
        serving._preempt_every = 7
        assert ears.answers(serving, "lost") == expected
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()
