"""Models that see give the tokens of the native program on JAX: whole, cut, cached, preempted."""

from __future__ import annotations

import pytest

from sylvan.kernels.native.library import describe
from tests.parity.test_multimodal import Eyes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]
OPTIONS = {"device": "jax", "dtype": "float32", "max_samples": 0}


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2.5-vl", "qwen3-vl", "voxtral"])
def test_answers_are_those_of_the_native_program(name, tmp_path):
    eyes = Eyes(name, tmp_path)
    most = 64 if eyes.family.prefix else 32
    cpu, _ = eyes.serving(runner="program", options={"dtype": "float32"})
    wanted = eyes.answers(cpu)
    cpu.close()

    limits = {"max_batch_tokens": most, "max_running_reqs": 4, "chunk_tokens": 16}
    serving, control = eyes.serving(runner="auto", options=OPTIONS, **limits)
    try:
        assert eyes.answers(serving) == wanted
        assert control.counts.encoded == 4
        assert eyes.answers(serving, "again") == wanted
        serving._preempt_every = 7
        assert eyes.answers(serving, "lost") == wanted
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()
