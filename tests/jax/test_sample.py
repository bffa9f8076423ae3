"""Tokens drawn on the device are those that the CPU draws from the same logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sylvan.kernels.xla import sample
from sylvan.runtime.executor.xla.functions import DRAW_TYPES
from sylvan.runtime.sampling.draw import draw
from sylvan.runtime.sampling.params import NO_TOP_K, SamplingBatch, SamplingSlots
from sylvan.runtime.sampling.philox import uniform

pytestmark = pytest.mark.sample
ROWS, VOCAB = 64, 500


def params_of(kind, rng):
    params = SamplingSlots(ROWS, VOCAB)
    params.greedy[:] = rng.random(ROWS) < 0.1
    params.temperature[:] = rng.choice([0.3, 0.9, 2.0], ROWS)
    params.seed[:] = rng.integers(0, 2**63 - 1, ROWS)
    params.sample[:] = rng.integers(0, 9, ROWS)
    if "k" in kind:
        params.top_k[:] = rng.choice([1, 5, 40, NO_TOP_K], ROWS)
    if "p" in kind:
        params.top_p[:] = rng.choice([0.1, 0.7, 0.95, 1.0], ROWS)
    if "m" in kind:
        params.min_p[:] = rng.choice([0.0, 0.02, 0.3], ROWS)
    return params


@pytest.mark.parametrize("kind", ["plain", "k", "p", "m", "kp", "kpm"])
def test_draws_equal_those_of_the_definition(kind):
    rng = np.random.default_rng(len(kind))
    params = params_of(kind if kind != "plain" else "", rng)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    logits[:, ::7] = logits[:, 1:2]  # equals
    logits[3, 5], logits[4, :] = np.nan, -np.inf
    slots, positions = np.arange(ROWS, dtype=np.int32), rng.integers(0, 2**33, ROWS)
    clean = torch.from_numpy(logits).nan_to_num(nan=-np.inf, neginf=-np.inf)
    wanted = draw(clean, SamplingBatch(slots, positions, params)).numpy()

    with jax.enable_x64(True):
        rows = {
            name: getattr(params, name).astype(dtype)
            for name, dtype in DRAW_TYPES.items()
            if name != "position"
        }
        given = sample.DrawRows(**rows, position=positions.astype(np.int64))
        found = np.asarray(jax.jit(sample.draw)(jnp.asarray(logits), given))

    assert found[4] == -1
    possible = np.arange(ROWS) != 4
    assert found[possible].tolist() == wanted[possible].tolist()
    assert len(set(found.tolist())) > 8


def test_random_numbers_are_those_of_the_cpu():
    rng = np.random.default_rng(1)
    seeds, samples = rng.integers(0, 2**63 - 1, 50), rng.integers(0, 2**31, 50)
    positions = rng.integers(0, 2**40, 50)

    with jax.enable_x64(True):
        found = sample.uniform(*(jnp.asarray(x) for x in (seeds, samples, positions)))
        found = np.asarray(found)

    assert found.tolist() == uniform(seeds, samples, positions).tolist()


def test_greedy_takes_the_first_of_equals_and_never_nan():
    logits = jnp.array([[1.0, 3.0, 3.0, jnp.nan], [-jnp.inf] * 4, [jnp.inf, 0, 0, jnp.inf]])

    assert np.asarray(sample.greedy(logits)).tolist() == [1, -1, 0]
