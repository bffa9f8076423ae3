from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.rope import inverse_frequencies, parse_rope, rope_table

POSITIONS, HEAD_DIM = 256, 32
FACTORS = [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)]
RULES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": FACTORS,
        "long_factor": [2 * f for f in FACTORS],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def config(rule: str) -> LlamaConfig:
    parameters = {"rope_type": rule, "rope_theta": 5000.0} | RULES[rule]
    return LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=POSITIONS, rope_parameters=parameters
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [48, 256, 600])
def test_frequencies_equal_transformers(rule, length):
    theirs = config(rule)
    kind = theirs.rope_parameters["rope_type"]

    params = parse_rope(theirs.to_dict(), POSITIONS)
    found, factor = inverse_frequencies(params, HEAD_DIM, POSITIONS, length)

    if kind == "default":
        expected, expected_factor = 1.0 / 5000.0 ** (torch.arange(0, 32, 2).float() / 32), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](theirs, None, seq_len=length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


def test_old_spelling_equals_new():
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 999.0}}
    old = {"rope_theta": 999.0, "rope_scaling": {"type": "linear", "factor": 2.0}}

    assert parse_rope(new, 64) == parse_rope(old, 64)


def test_nothing_said_is_the_default_rule():
    params = parse_rope({"rope_scaling": None}, 64)

    assert (params.rope_type, params.rope_theta) == ("default", 10_000.0)


def test_table_holds_cosines_then_sines_of_the_rotary_part():
    params = parse_rope({"rope_theta": 100.0, "partial_rotary_factor": 0.5}, 64)

    table = rope_table(params, 16, 64, 10)

    assert table.shape == (10, 8)
    assert table[3, 1].item() == pytest.approx(torch.tensor(3 * 100**-0.25).cos().item())
    assert table[3, 5].item() == pytest.approx(torch.tensor(3 * 100**-0.25).sin().item())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"rope_scaling": {"type": "spiral"}}, "unknown rope_type 'spiral'"),
        ({"rope_scaling": {"type": "linear"}}, "needs the parameter 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor of rope must be positive"),
        ({"rope_theta": 0}, "rope_theta of rope must be positive"),
        ({"rope_theta": "many"}, "bad rope parameters"),
        ({"partial_rotary_factor": 1.5}, "at most 1"),
    ],
)
def test_impossible_parameters_are_refused(raw, words):
    with pytest.raises(ConfigError, match=words):
        parse_rope(raw, 64)


def test_longrope_with_a_wrong_number_of_factors_is_refused():
    raw = {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}

    with pytest.raises(ConfigError, match="needs 8 factors"):
        rope_table(parse_rope(raw, 64), 16, 64)
