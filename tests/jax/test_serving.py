"""Serving on JAX gives the tokens of the native program, however a request was computed."""

from __future__ import annotations

import contextlib
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan import Engine
from sylvan.kernels.native.library import describe
from sylvan.protocol.commands import ReadWeights, ReleaseMemory
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.models.writer import write_quantised
from tests.jax.serving import on_cpu, on_jax
from tests.parity.checkpoints import SHAPE, VOCAB, make, write

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make("qwen3", path)
    return path


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(4, VOCAB, n).tolist() for n in (33, 2, 50, 16)]


@pytest.fixture(scope="module")
def expected(model_dir, prompts):
    serving = on_cpu(model_dir)
    kinds = {
        "greedy": {},
        "sampled": SAMPLED,
        "penalised": {"frequency_penalty": 0.8, "repetition_penalty": 1.3},
        "biased": {"logit_bias": {"7": 3.0}, "temperature": 0.7},
        "late end": {"min_new_tokens": 8, "stop_token_ids": list(range(60))},
    }
    return {name: (how, serving.generate(prompts, **how)) for name, how in kinds.items()}


@pytest.fixture(scope="module")
def serving(model_dir):
    serving = on_jax(model_dir)
    yield serving
    serving.close()


@contextlib.contextmanager
def compilations():
    """Counts what XLA compiles, by JAX's own events."""
    found = []

    def heard(event, duration, **about):
        if event == COMPILED:
            found.append(about)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalised", "biased", "late end"])
def test_tokens_are_those_of_the_cpu(serving, prompts, expected, name):
    how, wanted = expected[name]

    assert serving.generate(prompts, **how) == wanted


def test_tokens_are_the_same_alone_cached_chunked_and_preempted(model_dir, prompts, expected):
    _, wanted = expected["greedy"]
    serving = on_jax(model_dir, chunk_tokens=7, pages=16, conservativeness=0.1, overlap=True)
    try:
        assert [serving.generate([prompt])[0] for prompt in prompts] == wanted
        assert serving.generate(prompts) == wanted
        assert serving.scheduler.load().cached_prompt_tokens > 0
        serving._preempt_every = 5
        assert serving.generate(prompts) == wanted
        assert serving.scheduler.load().retractions > 0
    finally:
        serving.close()


def test_a_step_compiles_nothing_after_the_start(serving, prompts):
    with compilations() as warm:
        jax.jit(lambda x: x * 3 + len(prompts))(np.float32(2))
    with compilations() as found:
        for count in range(1, len(prompts) + 1):
            serving.generate(prompts[:count], **SAMPLED)
            serving.generate([[*prompt, 9] for prompt in prompts[:count]])
            serving.generate([prompt[:-1] for prompt in prompts[:count]])  # ends within a page

    assert warm, "the event is heard"
    assert found == []
    use = serving.facts.use()
    assert use["recompiled"] == 0
    assert use["compiled"] >= 8
    assert use["steps"] > 10
    assert 0 < use["waste"] < 0.9


def test_log_probabilities_are_those_of_the_cpu(model_dir, serving, prompts):
    wanted = LogprobOptions(top=3, token_ids=(5, 9), start=0)
    found = []
    for each in (on_cpu(model_dir), serving):
        rid = each.add(prompts[0], logprobs=wanted, max_new_tokens=4)
        each.run()
        found.append([out.logprobs for out in each.outputs[rid]])
    for cpu, own in zip(*found, strict=True):
        np.testing.assert_allclose(own.logprobs, cpu.logprobs, atol=1e-4)
        np.testing.assert_allclose(own.chosen_logprobs, cpu.chosen_logprobs, atol=1e-4)


def test_two_devices_give_the_tokens_of_one(model_dir, prompts, expected):
    serving = on_jax(model_dir, devices=2)
    try:
        assert "2 devices" in serving.facts.runner
        for name in ("greedy", "sampled"):
            how, wanted = expected[name]
            assert serving.generate(prompts, **how) == wanted
    finally:
        serving.close()


def test_two_devices_hold_half_of_the_heads_each(model_dir):
    serving = on_jax(model_dir, devices=2)
    (pages,) = serving.executor._worker._backend.batch.kv.groups
    keys = pages._arrays()[0]
    serving.close()

    assert len(keys.sharding.device_set) == 2
    assert keys.addressable_shards[0].data.shape[1] * 2 == keys.shape[1]


@pytest.mark.parametrize("devices", [1, 2])
def test_pallas_kernels_give_the_same_tokens(tmp_path, devices):
    small = SHAPE | {"num_hidden_layers": 1, "sliding_window": 20}
    write(transformers.MistralConfig(**small), 3, tmp_path)
    rng = np.random.default_rng(8)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (21, 3)]
    limits = {"max_batch_tokens": 16, "max_running_reqs": 2, "max_new_tokens": 6}
    wanted = on_cpu(tmp_path).generate(prompts, max_new_tokens=limits["max_new_tokens"])
    new = limits.pop("max_new_tokens")

    serving = on_jax(tmp_path, attention="pallas", devices=devices, **limits)

    assert serving.generate(prompts, max_new_tokens=new) == wanted
    serving.close()


def test_bfloat16_is_served_and_close(model_dir, prompts):
    rid, outputs = [], []
    for each in (
        on_cpu(model_dir),
        on_jax(model_dir, options={"dtype": "bfloat16"}, max_batch_tokens=32, max_running_reqs=1),
    ):
        rid = each.add(prompts[0], logprobs=LogprobOptions(top=1), max_new_tokens=1)
        each.run()
        outputs.append(each.outputs[rid][0].logprobs.logprobs[0])

    assert abs(outputs[0] - outputs[1]) < 0.5


def test_a_quantised_checkpoint_is_expanded(model_dir, prompts, tmp_path):
    write_quantised(model_dir, tmp_path / "out", "w8a8")
    stored = load_file(tmp_path / "out/model.safetensors")
    small = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    wide = {
        name: tensor.float() * stored[f"{name}_scale"].float() if name in small else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }
    (tmp_path / "wide").mkdir()
    save_file(wide, tmp_path / "wide/model.safetensors")
    shutil.copy(model_dir / "config.json", tmp_path / "wide")

    serving = on_jax(tmp_path / "out", max_batch_tokens=32, max_running_reqs=1)
    found = serving.generate(prompts[:1], max_new_tokens=8)

    assert len(small) > 10
    assert found == on_cpu(tmp_path / "wide").generate(prompts[:1], max_new_tokens=8)
    serving.close()


def test_pages_go_to_the_host_and_back(serving, prompts):
    serving.generate(prompts[:1])
    (pages,) = serving.executor._worker._backend.batch.kv.groups
    some = np.array([1, 2, 3], np.int32)
    first, second = pages.host_buffer(3), pages.host_buffer(3)

    moved = pages.export(some, first, checksum=True)
    moved.wait()
    assert moved.error is None
    assert np.count_nonzero(first) > 100
    free = np.array([90, 91, 92], np.int32)
    pages.import_(free, first, checksums=moved.checksums).wait()
    pages.export(free, second).wait()
    assert (first == second).all()

    first[5] ^= 1
    broken = pages.import_(free, first, checksums=moved.checksums)
    broken.wait()
    assert broken.error is not None
    with pytest.raises(ValueError, match="pages"):
        pages.export(np.array([10_000], np.int32), first)


def test_commands_that_need_host_memory_are_refused(serving):
    control = serving.executor.control

    assert (
        "be neither read nor updated" in control(ReadWeights("model.norm.weight", 3)).wait().error
    )
    assert "'kv_cache'; it has none" in control(ReleaseMemory(("kv_cache",))).wait().error


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"runner": "eager"}, "JAX runs step programs only"),
        ({"deterministic": True}, "results of XLA depend on the batch"),
        ({"quantization": "w8a8"}, "leave it at none"),
        ({"kv_dtype": "int8"}, "cache.dtype=int8"),
        ({"devices": 5}, "parallel.devices=5: JAX sees 4 devices"),
        ({"page_size": 24}, "cache.page_size=24"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(model_dir, options, why):
    sizes = {"page_size": 16, "num_pages": 20, "max_batch_tokens": 32, "max_running_reqs": 2}

    with pytest.raises(ConfigError, match=why):
        build_executor(model_dir, LocalOptions(**sizes | {"device": "jax"} | options))


def test_an_engine_serves_on_jax(model_dir, prompts, expected):
    settings = {
        "dtype": "float32",
        "max_running_requests": 2,
        "max_prefill_tokens": 32,
        "max_total_tokens": 2048,
        "page_size": 16,
        "processes": "one",
    }
    how = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    with Engine(model_path=str(model_dir), device="jax", **settings) as engine:
        found = engine.generate(input_ids=prompts, sampling_params=how)
        state = engine.get_server_info()

    assert [reply["output_ids"] for reply in found] == expected["greedy"][1]
    buckets = state["buckets"]
    assert buckets["recompiled"] == 0
    assert buckets["steps"] > 4


def test_what_is_compiled_during_a_step_is_counted(serving, prompts):
    functions = serving.executor._worker._backend._runner._functions
    before = serving.facts.use()["recompiled"]
    kept = dict(functions._steps)
    functions._steps.clear()  # as if a bucket had been left out
    try:
        serving.generate(prompts[:1], max_new_tokens=2)
        assert serving.facts.use()["recompiled"] > before
    finally:
        functions._steps |= kept
        serving.executor._worker._backend._runner.use.recompiled = before
