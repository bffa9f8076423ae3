"""One vector of a text, from the vectors of its tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sylvan.runtime.features.embeddings.control import PoolSlice
from sylvan.runtime.features.embeddings.pooling import Pooler
from sylvan.runtime.models.pooling import PoolingSpec

ROWS, SIZE = 23, 8
HIDDEN = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(3))


class Hidden:
    """The rows from `start` on as a step computed them."""

    def __init__(self, start: int = 0) -> None:
        self._start = start

    def hidden(self, rows: np.ndarray) -> torch.Tensor:
        return HIDDEN[torch.from_numpy(rows).long() + self._start]

    def logits(self, rows: np.ndarray) -> torch.Tensor:
        return self.hidden(rows)[:, :2] * 2


def pool(modes, cuts=(), **fields):
    pooler = Pooler(PoolingSpec(modes=modes, normalize=fields.pop("unit", False)))
    asked = fields.get("dimensions"), fields.get("normalize", True)
    borders, vector = (0, *cuts, ROWS), None
    for start, stop in itertools.pairwise(borders):
        rows = np.arange(stop - start, dtype=np.int32)
        work = PoolSlice(0, start, stop == ROWS, *asked)
        vector = pooler.add(Hidden(start), 5, rows, work)
        assert (vector is None) == (stop < ROWS)
    return vector


EXPECTED = {
    "cls": HIDDEN[0],
    "last": HIDDEN[-1],
    "max": HIDDEN.amax(0),
    "mean": HIDDEN.double().mean(0),
    "mean_sqrt_len": HIDDEN.double().sum(0) / ROWS**0.5,
    "weightedmean": (HIDDEN.double() * torch.arange(1, ROWS + 1)[:, None]).sum(0) / 276,
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_each_pooling_equals_its_definition(mode):
    assert np.allclose(pool((mode,)), EXPECTED[mode].numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("cuts", [(1,), (7, 8, 20)])
def test_a_vector_does_not_depend_on_how_a_text_was_divided(mode, cuts):
    assert np.array_equal(pool((mode,)), pool((mode,), cuts))


def test_several_poolings_are_joined():
    joined = pool(("cls", "max"), (9,))

    assert np.array_equal(joined, np.concatenate([pool(("cls",)), pool(("max",))]))


def test_a_shortened_vector_has_unit_length_by_default():
    short = pool(("last",), unit=True, dimensions=3)
    raw = pool(("last",), unit=True, dimensions=3, normalize=False)

    assert np.allclose(short, raw / np.linalg.norm(raw), atol=1e-6)
    assert np.array_equal(raw, HIDDEN[-1, :3].numpy())


def test_labels_come_from_the_last_token_by_the_recorded_head():
    pooler = Pooler(PoolingSpec(modes=("last",), normalize=False), labels=True)
    work = PoolSlice(0, 0, True, None, True)

    found = pooler.add(Hidden(), 0, np.arange(ROWS, dtype=np.int32), work)

    assert np.array_equal(found, (HIDDEN[-1, :2] * 2).numpy())


def test_labels_of_other_poolings_go_through_the_head():
    spec = PoolingSpec(modes=("cls",), normalize=False)
    pooler = Pooler(spec, labels=True, head=lambda vectors: vectors[:, :2] + 1)
    work = PoolSlice(0, 0, True, None, True)

    found = pooler.add(Hidden(), 0, np.arange(ROWS, dtype=np.int32), work)

    assert np.array_equal(found, (HIDDEN[0, :2] + 1).numpy())


def test_a_request_that_comes_back_starts_afresh():
    pooler = Pooler(PoolingSpec(modes=("mean",), normalize=False))
    asked = None, True
    half = np.arange(10, dtype=np.int32)
    pooler.add(Hidden(), 0, half, PoolSlice(0, 0, False, *asked))

    whole = pooler.add(Hidden(), 0, np.arange(ROWS, dtype=np.int32), PoolSlice(0, 0, True, *asked))

    assert np.array_equal(whole, pool(("mean",)))
