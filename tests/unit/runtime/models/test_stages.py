"""Which layers each pipeline stage has."""

import pytest

from sylvan.runtime.layers.stage import Stage
from sylvan.runtime.models.config import ModelConfig, MoEConfig, RopeParams
from sylvan.runtime.models.stages import num_last_layers

HALF_BILLION = {  # Qwen2.5-0.5B: the head has as many weights as nine layers
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def config_of(**changes: object) -> ModelConfig:
    known = {"architecture": "A", "max_position_embeddings": 64, "rope": RopeParams()}
    sizes = HALF_BILLION | changes
    known["layer_windows"] = (None,) * sizes["num_hidden_layers"]
    return ModelConfig(**(known | sizes))


def sizes(config: ModelConfig, count: int) -> list[int]:
    last = num_last_layers(config, count)
    stages = [Stage(n, count, config.num_hidden_layers, last) for n in range(count)]
    layers = [layer for stage in stages for layer in stage.layers]
    assert layers == [*range(config.num_hidden_layers)]
    return [len(stage.layers) for stage in stages]


def test_the_last_stage_has_fewer_layers_as_it_has_the_head():
    assert sizes(config_of(), 2) == [17, 7]
    assert sizes(config_of(), 3) == [11, 11, 2]
    assert sizes(config_of(vocab_size=256), 2) == [12, 12]
    assert sizes(config_of(vocab_size=256, num_hidden_layers=7), 4) == [2, 2, 2, 1]


def test_a_layer_does_the_work_of_the_experts_that_a_token_uses():
    moe = MoEConfig(num_experts=64, top_k=2, inner=608, layers=tuple(range(24)))
    assert sizes(config_of(moe=moe), 2) == [23, 1]


@pytest.mark.parametrize(("whole", "found"), [({5, 23}, [17, 7]), ({3, 14}, [14, 10])])
def test_every_stage_has_layers_of_each_kind(whole, found):
    windows = tuple(None if layer in whole else 512 for layer in range(24))
    assert sizes(config_of(layer_windows=windows), 2) == found


def test_kinds_that_no_cut_gives_every_stage_are_told():
    windows = (None, *[512] * 23)
    assert num_last_layers(config_of(layer_windows=windows), 2) == 0
