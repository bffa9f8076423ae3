"""Layers that attend and sizes of states, from config.json alone."""

from __future__ import annotations

import pytest

from sylvan.config.recurrent import attending_and_state
from sylvan.config.resolve import resolve
from sylvan.config.tree import Config
from tests.support.config_facts import make_facts, make_model

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, (3, 0)),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (3, 0)),
        ({"layer_types": ["conv", "full_attention", "conv"], "hidden_size": 10}, (1, 2 * 10 * 3)),
        ({"model_type": "falcon_h1", **MAMBA}, (3, 3 * (32 * 16 + (32 + 64) * 4))),
        ({"model_type": "bamba", "attn_layer_indices": [1], **MAMBA}, (1, 2 * (512 + 96 * 4))),
        (
            {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **DELTA},
            (1, 2 * (4 * 8 * 16 + (2 * 2 * 8 + 64) * 4)),
        ),
        (
            {
                "model_type": "kimi_linear",
                "linear_attn_config": {
                    "full_attn_layers": [2],
                    "num_heads": 4,
                    "head_dim": 8,
                    "short_conv_kernel_size": 3,
                },
            },
            (1, 2 * 4 * 8 * (8 + 3 * 3)),
        ),
        ({"model_type": "mamba", "hidden_size": 8, "state_size": 4}, (0, 3 * 16 * (4 + 4))),
    ],
)
def test_layers_and_numbers_of_a_state(config, expected):
    assert attending_and_state(config, 3) == expected


def test_states_are_planned_within_the_memory_and_limit_running_requests():
    model = make_model(state_numbers=16 << 20)

    plan = resolve(Config(), make_facts(model=model))

    assert plan.config.cache.max_states == 10, "a third of 2 GiB less weights, by 64 MiB"
    assert plan.config.scheduler.max_running_reqs == 9
    assert plan.plan.work_bytes > 10 * (64 << 20)


def test_models_that_attend_everywhere_plan_no_states():
    plan = resolve(Config(), make_facts())

    assert plan.config.cache.max_states == 1
    assert plan.config.scheduler.max_running_reqs == 256
