"""Which differences from transformers count as rounding."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.parity.checkpoints import make
from tests.parity.compare import greedy_up_to_rounding, teacher
from tests.parity.rounding import Exact

IDS = list(range(4, 44))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def judged(model):
    return Exact(model).rows(IDS)


def test_float32_is_explained(model, judged):
    rows, explained = judged

    assert rows.dtype == np.float64
    assert (np.abs(teacher(model, IDS) - rows).max(1) <= explained).all()
    assert explained.max() < 1e-2


def test_the_same_bits_are_found_again(model, judged):
    again = Exact(model).rows(IDS)

    assert all(map(np.array_equal, judged, again))


@pytest.mark.parametrize("what", ["epsilon", "position", "weight"])
def test_another_computation_is_not_explained(model, judged, what):
    other = copy.deepcopy(model)
    if what == "epsilon":
        for layer in other.model.layers:
            layer.input_layernorm.variance_epsilon = 1e-5
    elif what == "position":
        other.model.rotary_emb.inv_freq *= 1 + 1e-4
    else:
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight *= 1 + 1e-4
    rows, explained = judged

    assert (np.abs(teacher(other, IDS) - rows).max(1) > explained).any()


def test_ties_are_greedy_either_way_and_end_the_comparison():
    rows = np.log(np.array([[0.5, 0.3, 0.2], [0.4, 0.4 - 1e-9, 0.2], [0.1, 0.1, 0.8]]))
    gap = np.full(3, 1e-6)

    assert greedy_up_to_rounding([0, 0, 2], [0, 0, 2], rows, gap)
    assert greedy_up_to_rounding([0, 1, 0], [0, 0, 2], rows, gap)
    assert not greedy_up_to_rounding([0, 0, 0], [0, 0, 2], rows, gap)
    assert not greedy_up_to_rounding([1, 0, 2], [0, 0, 2], rows, gap)
