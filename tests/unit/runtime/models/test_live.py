"""Weights in force: what cannot be written whole is never computed with."""

from __future__ import annotations

import pytest
import torch

from sylvan.protocol.errors import ConfigError, ExecutorError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.holders import ParameterNames
from sylvan.runtime.models.in_memory import InMemory, Merged
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.models.slots import slots
from tests.support.random_model import write_random_model
from tests.support.updates import Shifting, changed, weights_in


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=64)


@pytest.fixture
def live(model_dir):
    config = load_config(model_dir)

    def made(device: str):
        build = Build(dtype=torch.float32, length=64, device=torch.device(device))
        return family_of(config).model(config, build)

    model = made("cpu")
    load_weights(model, model_dir)
    names = ParameterNames(model, slots(made("meta")))
    changes = []
    found = LiveWeights(lambda: made("meta"), names.holders(model, ()), lambda: changes.append(1))
    found.changes = changes
    return found


def test_files_that_change_while_they_are_read_stop_everything(live, model_dir):
    new = changed(weights_in(model_dir))
    name = "model.layers.1.mlp.down_proj.weight"

    with pytest.raises(ExecutorError, match="failed midway"):
        live.update(Shifting(new, name), partial=True)

    assert live.missing
    assert live.changes == []
    with pytest.raises(ConfigError, match="update all weights"):
        live.tensor(name)
    with pytest.raises(ConfigError, match="lacks the tensor"):
        live.update(InMemory({name: new[name]}), partial=True)
    live.update(InMemory(new), partial=True)
    assert live.missing is None
    assert torch.equal(live.tensor(name), new[name])


def test_sums_name_each_tensor_and_follow_its_numbers(live, model_dir):
    before = live.checksums()
    assert len(before) == len(weights_in(model_dir))
    part = {"lm_head.weight": weights_in(model_dir)["lm_head.weight"] + 0.5}

    live.update(InMemory(part), partial=True)
    after = live.checksums()
    live.update(InMemory(weights_in(model_dir)), partial=False)

    assert {name for name in after if after[name] != before[name]} == {"lm_head.weight"}
    assert live.checksums() == before
    assert live.changes == [1, 1]


def test_later_parts_win(model_dir):
    one, two = InMemory({"a": torch.zeros(2), "b": torch.zeros(3)}), InMemory({"a": torch.ones(4)})

    merged = Merged([one, two])

    assert merged.tensors["a"].shape == (4,)
    assert merged.num_bytes == 4 * (4 + 3)
    assert torch.equal(merged.tensor("a"), torch.ones(4))
