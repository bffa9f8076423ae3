"""Native drawing against the definition in the runtime's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels.native.library import Library, load
from sylvan.kernels.sample import DrawParams, draw
from sylvan.runtime.sampling import draw as definition
from sylvan.runtime.sampling.params import NO_TOP_K, SamplingBatch, SamplingSlots
from sylvan.runtime.sampling.philox import uniform
from tests.support.native import variants

ROWS = 64


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


def slots(vocab: int, **columns: object) -> SamplingSlots:
    found = SamplingSlots(ROWS, vocab)
    found.greedy[:] = False
    found.seed[:] = np.arange(ROWS)
    for name, value in columns.items():
        getattr(found, name)[:] = value
    return found


def both(library: Library, logits: np.ndarray, params: SamplingSlots) -> tuple[np.ndarray, ...]:
    """Ids by the native call, and by definition."""
    positions = np.arange(ROWS, dtype=np.int64)
    rows = np.arange(ROWS, dtype=np.int32)
    want = definition.draw(torch.from_numpy(logits.copy()), SamplingBatch(rows, positions, params))
    given = DrawParams(
        params.greedy,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        uniform(params.seed, params.sample, positions),
    )
    return draw(library, logits, given), want.numpy()


CASES = {
    "greedy": {"greedy": True},
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 5.0},
    "top k": {"top_k": 7},
    "top k of one": {"top_k": 1},
    "top p": {"top_p": 0.6},
    "tiny top p": {"top_p": 1e-6},
    "min p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    "k beyond the vocabulary": {"top_k": NO_TOP_K, "top_p": 0.95},
    "each its own": {
        "top_k": np.where(np.arange(ROWS) % 3 == 0, 5, NO_TOP_K),
        "top_p": np.where(np.arange(ROWS) % 2 == 0, 0.5, 1.0),
        "temperature": np.linspace(0.1, 3, ROWS),
    },
}


@pytest.mark.parametrize("vocab", [5, 1003])
@pytest.mark.parametrize("name", CASES)
def test_draws_what_the_definition_draws(library: Library, name: str, vocab: int) -> None:
    logits = np.random.default_rng(3).normal(0, 3, (ROWS, vocab)).astype(np.float32)

    got, want = both(library, logits, slots(vocab, **CASES[name]))

    # The exponentials differ in the last digit, which may move a draw across a border.
    assert (got != want).sum() <= 1


@pytest.mark.parametrize("name", CASES)
def test_equal_logits_are_taken_in_order_of_ids(library: Library, name: str) -> None:
    logits = np.zeros((ROWS, 48), np.float32)
    logits[:, ::2] = 1.0

    got, want = both(library, logits, slots(48, **CASES[name]))

    assert (got != want).sum() <= 1


def test_forbidden_ids_are_never_drawn(library: Library) -> None:
    logits = np.full((ROWS, 300), -np.inf, np.float32)
    logits[:, [17, 290]] = 0.0

    got, _ = both(library, logits, slots(300, temperature=100.0))

    assert set(got.tolist()) == {17, 290}


def test_a_draw_depends_on_its_own_row_only(library: Library) -> None:
    logits = np.random.default_rng(5).normal(0, 2, (ROWS, 1000)).astype(np.float32)
    params = slots(1000, top_p=0.9)
    everything, _ = both(library, logits, params)
    columns = ("greedy", "temperature", "top_k", "top_p", "min_p")

    for row in (0, 31, 63):
        one = slice(row, row + 1)
        u = uniform(params.seed[one], params.sample[one], np.array([row]))
        alone = DrawParams(*(getattr(params, name)[one] for name in columns), u)
        assert draw(library, logits[one], alone)[0] == everything[row]
