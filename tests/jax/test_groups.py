"""Groups of devices with different requests give the tokens of one device."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from tests.jax.serving import on_cpu, on_jax
from tests.parity.checkpoints import VOCAB, make, write
from tests.parity.families import DENSE, EXPERT
from tests.parity.rare import RECURRENT

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

CASES = {"gemma3": DENSE["gemma3"], "deepseek-v3": EXPERT["deepseek-v3"]}
"""With layers of windows, whose first pages are given back; and with latents and experts."""
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make("qwen3", path)
    return path


def prompts_of(lengths):
    rng = np.random.default_rng(5)
    return [rng.integers(4, VOCAB, n).tolist() for n in lengths]


def test_two_groups_give_the_tokens_of_one_device(model_dir):
    prompts = prompts_of((33, 2, 50, 16))
    hows = {}, SAMPLED, {"repetition_penalty": 1.3}
    cpu = on_cpu(model_dir)
    wanted = [cpu.generate(prompts, max_new_tokens=12, **how) for how in hows]
    serving = on_jax(model_dir, devices=2, groups=2, chunk_tokens=16, pages=40)
    try:
        assert "2 groups" in serving.facts.runner
        found = [serving.generate(prompts, max_new_tokens=12, **how) for how in hows]
        again = serving.generate([[*prompt, 9] for prompt in prompts], max_new_tokens=12)
        assert serving.scheduler.load().cached_prompt_tokens > 0
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()

    assert found == wanted
    assert again == cpu.generate([[*prompt, 9] for prompt in prompts], max_new_tokens=12)
    cpu.close()


def test_each_group_has_the_pages_of_its_own_requests(model_dir):
    serving = on_jax(model_dir, devices=2, groups=2, pages=20, max_batch_tokens=32)
    (pages,) = serving.executor._worker._backend.batch.kv.groups
    keys, _ = serving.executor._worker._backend.batch.kv.arrays[0]
    first, second = (np.asarray(shard.data) for shard in keys.addressable_shards)
    assert not first.any()

    serving.generate(prompts_of((20,)), max_new_tokens=2)
    keys, _ = serving.executor._worker._backend.batch.kv.arrays[0]
    held = [bool(np.asarray(shard.data)[1:].any()) for shard in keys.addressable_shards]
    assert sorted(held) == [False, True]
    serving.generate(prompts_of((20, 24)), max_new_tokens=2)
    keys, _ = serving.executor._worker._backend.batch.kv.arrays[0]
    held = [bool(np.asarray(shard.data)[1:].any()) for shard in keys.addressable_shards]
    serving.close()

    assert held == [True, True]
    assert keys.shape[0] == pages.num_pages + 1  # each has a page 0
    assert second.shape == first.shape


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "groups"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", CASES)
def test_groups_divide_models_too(name, devices, groups, tmp_path):
    write(CASES[name](), 5, tmp_path)
    prompts = prompts_of((40, 3, 17))
    cpu = on_cpu(tmp_path)
    wanted = cpu.generate(prompts, max_new_tokens=12)
    cpu.close()
    limits = {"chunk_tokens": 16, "max_batch_tokens": 32, "max_running_reqs": 3, "pages": 40}
    serving = on_jax(tmp_path, devices=devices, groups=groups, **limits)
    try:
        assert serving.generate(prompts, max_new_tokens=12) == wanted
        assert serving.generate(prompts, max_new_tokens=12) == wanted
        serving._preempt_every = 5
        assert serving.generate(prompts, max_new_tokens=12) == wanted
        assert serving.scheduler.load().retractions > 0
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()


def test_recurrent_states_stay_together(tmp_path):
    write(RECURRENT["mamba2"](), 5, tmp_path)

    with pytest.raises(ConfigError, match=r"attention_dp=2: .* keeps recurrent states"):
        on_jax(tmp_path, devices=2, groups=2)
