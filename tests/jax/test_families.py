"""Every native family on JAX: greedy tokens of the native program, in every mode (float32)."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from tests.jax.serving import on_cpu, on_jax
from tests.parity import families, rare
from tests.parity.checkpoints import FAMILIES, VOCAB, write
from tests.parity.published_models import PUBLISHED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]

NEW = 12
LENGTHS = 40, 3, 17
RECURRENT = (
    *("bamba", "falcon-mamba", "granite4", "jamba", "lfm2", "lfm2-moe", "mamba", "mamba2"),
    *("minimax", "qwen3-next", "qwen3.5", "qwen3.5-moe", "recurrent-gemma", "rwkv"),
)
"""Those of them that are native."""
ATTENDING = {**FAMILIES, **families.DENSE, **families.EXPERT}
EVERY = {
    **ATTENDING,
    **{name: rare.RECURRENT[name] for name in RECURRENT},
}


PUBLISHED_ONLY = "rwkv7", "xlstm"
"""Those whose random checkpoints are written by their published computation."""


@pytest.mark.parametrize("name", [*EVERY, *PUBLISHED_ONLY])
def test_greedy_tokens_are_those_of_the_native_program(name, tmp_path):
    if name in PUBLISHED_ONLY:
        PUBLISHED[name].make(5).write(tmp_path)
    else:
        write(EVERY[name](), 5, tmp_path)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]
    cpu = on_cpu(tmp_path, runner="program" if name in ATTENDING else "auto")
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


@pytest.mark.parametrize("name", EVERY)
def test_two_devices_give_the_tokens_of_one(name, tmp_path):
    write(EVERY[name](), 5, tmp_path)
    prompts = [[5, 6, 7, 8] * 6, [9, 10] * 8]
    wanted = on_cpu(tmp_path, runner="auto").generate(prompts, max_new_tokens=NEW)
    serving = on_jax(tmp_path, devices=2, max_batch_tokens=16, max_running_reqs=1)
    try:
        assert serving.generate(prompts, max_new_tokens=NEW) == wanted
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("jetmoe", r"torch\.topk has no lowering"),
        ("longcat-flash", "experts that return what they read, and attention over latents"),
        ("deepseek-v32", "sparse attention over pages"),
    ],
)
def test_a_family_without_a_lowering_is_refused_by_what_it_lacks(name, why, tmp_path):
    write(rare.ALL[name](), 5, tmp_path)

    with pytest.raises(ConfigError, match=f"device=jax: .*{why}.*; serve this model with device="):
        on_jax(tmp_path, max_batch_tokens=16, max_running_reqs=1)
