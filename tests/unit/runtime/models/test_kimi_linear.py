"""Kimi Linear's config.json, as published and as transformers writes it."""

from __future__ import annotations

from typing import Any

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.kimi_linear import KimiLinear, parse
from tests.support.published_checkpoints import PUBLISHED

RAW = PUBLISHED["moonshotai/Kimi-Linear-48B-A3B-Instruct"].raw


def test_published_names_are_read():
    config = parse(RAW)

    assert config.attention_layers == (3, 7, 11, 15, 19, 23, 26)
    assert config.max_position_embeddings == 1_048_576
    assert [part.shape for part in config.states[:2]] == [(4, 3 * 4096), (32, 128, 128)]
    assert len(config.states) == 2 * 20
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.shared) == (256, 8, 1024)
    assert config.moe.layers == tuple(range(1, 27))
    assert config.latent is not None
    assert config.latent.q_rank is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False; only True is served"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"linear_attn_config": None}, "layer_types must name each layer"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        parse(RAW | change)


def test_names_of_tensors():
    name = KimiLinear.source_name
    at = "layers.1."

    assert name(None, at + "mlp.experts.3.gate_proj.weight") == (
        at + "block_sparse_moe.experts.3.w1.weight"
    )
    assert name(None, at + "mlp.shared_experts.down_proj.weight") == (
        at + "block_sparse_moe.shared_experts.down_proj.weight"
    )
    assert name(None, "layers.0.mlp.down_proj.weight") == "layers.0.mlp.down_proj.weight"
