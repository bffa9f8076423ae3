from __future__ import annotations

import json

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import kv_bytes_per_token, read_config
from sylvan.runtime.models.registry import MODELS, load_config, load_family

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}


def parsed(tmp_path, **changes):
    raw = {k: v for k, v in (LLAMA | changes).items() if v is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return load_config(tmp_path)


def test_llama_is_read(tmp_path):
    config = parsed(tmp_path)

    assert (config.head_dim, config.dtype, config.eos_ids) == (16, "bfloat16", (2, 7))
    assert config.layer_windows == (None, None, None)
    assert not config.qk_norm


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path):
    config = parsed(tmp_path)

    assert kv_bytes_per_token(config) == 3 * 2 * (2 * 16) * 2
    assert kv_bytes_per_token(config, "float32") == 2 * kv_bytes_per_token(config)


def test_heads_default_to_no_grouping(tmp_path):
    assert parsed(tmp_path, num_key_value_heads=...).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 8, None),
        ),
    ],
)
def test_windows_of_layers(tmp_path, changes, windows):
    assert parsed(tmp_path, **changes).layer_windows == windows


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("Llama", (False, False, "")),
        ("Mistral", (False, False, "")),
        ("Qwen2", (True, False, "")),
        ("Qwen3", (False, False, "head")),
    ],
)
def test_switches_of_families(tmp_path, family, switches):
    config = parsed(tmp_path, architectures=[f"{family}ForCausalLM"])

    assert (config.qkv_bias, config.o_bias, config.qk_norm) == switches


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size must be in 1..4000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be in"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 15}, "must be even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"hidden_act": "snake"}, "unknown activation 'snake'"),
        ({"torch_dtype": "int3"}, "unsupported dtype 'int3'"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"max_position_embeddings": -4}, "max_position_embeddings"),
        ({"architectures": []}, "architectures must name one model"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "x"}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "at least 1"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 4, "layer_types": []},
            None,
        ),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"]}, "1 entries for 3 layers"),
    ],
)
def test_impossible_values_are_refused_in_one_sentence(tmp_path, changes, words):
    if words is None:
        assert parsed(tmp_path, **changes).layer_windows == (None,) * 3
        return
    with pytest.raises(ConfigError, match=words) as caught:
        parsed(tmp_path, **changes)
    assert "\n" not in str(caught.value)


def test_unsupported_architecture_lists_what_is_supported():
    with pytest.raises(ConfigError) as caught:
        load_family("LamaForCausalLM")

    assert "did you mean LlamaForCausalLM?" in str(caught.value)
    assert all(name in str(caught.value) for name in MODELS)


@pytest.mark.parametrize("architecture", MODELS)
def test_every_line_of_the_table_names_a_module(architecture):
    family = load_family(architecture)

    assert callable(family.parse)
    assert callable(family.model)


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read"), ("[]", "not a JSON object")])
def test_broken_config_files_are_refused(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=words):
        read_config(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="no model directory"):
        read_config(tmp_path / "nothing")
