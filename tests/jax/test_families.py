"""Every native family on JAX: greedy tokens of the native program, in every mode (float32)."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from tests.jax.serving import on_cpu, on_jax
from tests.parity import families
from tests.parity.checkpoints import FAMILIES, VOCAB, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]

NEW = 12
LENGTHS = 40, 3, 17
EVERY = {**FAMILIES, **families.DENSE, **families.EXPERT}


@pytest.mark.parametrize("name", EVERY)
def test_greedy_tokens_are_those_of_the_native_program(name, tmp_path):
    write(EVERY[name](), 5, tmp_path)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]
    cpu = on_cpu(tmp_path)
    wanted = cpu.generate(prompts, max_new_tokens=NEW)
    serving = on_jax(tmp_path, chunk_tokens=16, max_batch_tokens=32, max_running_reqs=3)
    try:
        alone = [serving.generate([prompt], max_new_tokens=NEW)[0] for prompt in prompts[:1]]
        modes = {"alone": alone}
        modes["batched, chunked"] = serving.generate(prompts, max_new_tokens=NEW)
        modes["cached"] = serving.generate(prompts, max_new_tokens=NEW)
        serving._preempt_every = 5
        modes["preempted"] = serving.generate(prompts, max_new_tokens=NEW)
        assert serving.scheduler.load().retractions > 0
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()

    wrong = {mode: found for mode, found in modes.items() if found != wanted[: len(found)]}
    assert wrong == {}


RECURRENT = {
    "mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_families_with_recurrent_layers_are_refused(name, tmp_path):
    write(RECURRENT[name](), 5, tmp_path)

    with pytest.raises(ConfigError, match="recurrent layers have no lowering to JAX"):
        on_jax(tmp_path)
