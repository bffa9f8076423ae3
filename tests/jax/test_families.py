"""Every native family on JAX: greedy tokens of the native program, in every mode (float32)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from tests.jax.serving import on_cpu, on_jax
from tests.parity import checkpoints, rare
from tests.parity.checkpoints import VOCAB, write
from tests.parity.published_blocks import FILLING, WHOLE
from tests.parity.published_models import PUBLISHED
from tests.parity.reading import READING, START, ReadingServing, pair
from tests.parity.serving import Serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]

TABLE = json.loads((Path(__file__).parents[1] / "parity/results.json").read_text())
"""Source of docs/reference/models.md: a family that is new there is compared here."""
CONFIGS = {**checkpoints.FAMILIES, **rare.ALL}
REFUSED = {
    "deepseek-v4": "ops without a lowering to JAX: Stream.*",
    "persimmon": ".*transformers.*",
}
"""Families without a lowering, and what they lack."""
NATIVE = [
    name
    for name, row in TABLE.items()
    if row["path"] == "native" and "cosine" not in row and name not in {*FILLING, *WHOLE, *REFUSED}
]
"""All that generate token by token; others are compared by test_vectors and test_diffusion."""
SAMPLE = "deepseek-v2", "jamba", "phi3-small", "qwen3", "step3.5"
DIVIDED_SAMPLE = ("qwen3",)
NEW = 12
LENGTHS = 40, 3, 17


def written(name, folder):
    """Write a random checkpoint; return what serves it, and what its prompts begin with."""
    if name in READING:
        pair(name, folder)
        return ReadingServing, [START]
    if name in PUBLISHED:
        PUBLISHED[name].make(5).write(folder)
    else:
        write(CONFIGS[name](), 5, folder)
    return Serving, []


def families(sample):
    """All native families; `sample` are those that CI runs."""
    return [pytest.param(n, marks=pytest.mark.sample) if n in sample else n for n in NATIVE]


def runner_of(name):
    return "program" if TABLE[name]["runner"] == "program" else "auto"


def test_the_table_has_all_kinds():
    for kind in (CONFIGS, READING, PUBLISHED):
        assert any(name in kind for name in NATIVE)
    assert len(NATIVE) > 140
    assert {*SAMPLE, *DIVIDED_SAMPLE} <= {*NATIVE}


@pytest.mark.parametrize("name", families(SAMPLE))
def test_greedy_tokens_are_those_of_the_native_program(name, tmp_path):
    serve, start = written(name, tmp_path)
    rng = np.random.default_rng(7)
    prompts = [start + rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]
    cpu = on_cpu(tmp_path, runner=runner_of(name), serve=serve)
    wanted = cpu.generate(prompts, max_new_tokens=NEW)
    cpu.close()
    limits = {"chunk_tokens": 16, "max_batch_tokens": 32, "max_running_reqs": 3}
    serving = on_jax(tmp_path, serve=serve, **limits)
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


@pytest.mark.parametrize("name", families(DIVIDED_SAMPLE))
def test_two_devices_give_the_tokens_of_one(name, tmp_path):
    serve, start = written(name, tmp_path)
    prompts = [start + [5, 6, 7, 8] * 6, start + [9, 10] * 8]
    wanted = on_cpu(tmp_path, runner="auto", serve=serve).generate(prompts, max_new_tokens=NEW)
    serving = on_jax(tmp_path, devices=2, serve=serve, max_batch_tokens=16, max_running_reqs=1)
    try:
        assert serving.generate(prompts, max_new_tokens=NEW) == wanted
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()


@pytest.mark.parametrize(("name", "lack"), REFUSED.items())
def test_a_family_without_a_lowering_is_refused_by_what_it_lacks(name, lack, tmp_path):
    write(CONFIGS[name](), 5, tmp_path)

    with pytest.raises(ConfigError, match=rf"device=jax: {lack}; serve this model with"):
        on_jax(tmp_path, max_batch_tokens=16, max_running_reqs=1)
