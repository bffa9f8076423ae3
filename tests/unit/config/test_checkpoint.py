from __future__ import annotations

import json
import struct

import pytest

from sylvan.config.checkpoint import ASSETS, model_dir, model_facts
from sylvan.config.plan import weight_bytes
from sylvan.config.tree import BUILT_IN_MODELS
from sylvan.protocol.errors import ConfigError
from tests.support.quantised_models import write_quantised_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny-llama"
    path.mkdir()
    write_config(path)
    return path


def write_config(path, **changes):
    (path / "config.json").write_text(json.dumps(CONFIG | changes))


def write_weights(path, name="model.safetensors", **shapes):
    header = {n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    (path / name).write_bytes(struct.pack("<Q", len(text)) + text)


def test_facts_come_from_the_config(folder):
    facts = model_facts(str(folder))

    assert (facts.context_len, facts.vocab_size, facts.dtype) == (512, 100, "bfloat16")
    assert facts.kv_per_token == 2 * 2 * 2 * 16
    layer = 2 * 64 * 16 * (4 + 2) + 3 * 64 * 128
    assert facts.num_linear_params == 2 * layer
    assert facts.num_params == 2 * layer + 2 * 100 * 64


def test_sizes_in_the_spelling_of_gpt2_count(folder):
    old = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(old))

    facts = model_facts(str(folder))

    assert (facts.context_len, facts.kv_per_token) == (256, 2 * 3 * 4 * 16)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("deepseek_v3", 32 + 8), ("minicpm3", 32 + 8), ("bailing_hybrid", 2 * 4 * 24)],
)
def test_latent_attention_is_kept_compressed_or_whole(folder, kind, kept):
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    write_config(folder, model_type=kind, **sizes)

    assert model_facts(str(folder)).kv_per_token == 2 * kept


def test_stored_weights_are_counted_over_all_files(folder):
    write_weights(folder, "a.safetensors", x=[100, 64], y=[3])
    write_weights(folder, "b.safetensors", z=[2, 2, 2])

    assert model_facts(str(folder)).num_params == 6400 + 3 + 8


def test_text_part_of_a_nested_config_counts(folder):
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIG}))

    assert model_facts(str(folder)).context_len == 512


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be"),
        ({"torch_dtype": "float8"}, "unsupported dtype 'float8'"),
    ],
)
def test_impossible_configs_are_refused(folder, change, words):
    write_config(folder, **change)

    with pytest.raises(ConfigError, match=words):
        model_facts(str(folder))


@pytest.mark.parametrize(
    "field", ["architectures", "layer_types", "rope_scaling", "rope_parameters", "auto_map"]
)
def test_fields_of_another_form_are_refused(folder, field):
    write_config(folder, **{field: 5})

    with pytest.raises(ConfigError, match=rf"config\.json: {field} must be an? .*, is 5"):
        model_facts(str(folder))


def test_a_config_nested_too_deep_is_refused(folder):
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)

    with pytest.raises(ConfigError, match="nested too deep"):
        model_facts(str(folder))


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_broken_configs_are_refused(folder, text):
    (folder / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=r"config\.json"):
        model_facts(str(folder))


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"nope"])
def test_broken_weights_are_refused(folder, data):
    (folder / "model.safetensors").write_bytes(data)

    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        model_facts(str(folder))


def test_a_missing_directory_names_the_nearest(folder):
    with pytest.raises(ConfigError, match="did you mean") as error:
        model_dir(str(folder.parent / "tiny-lama"))

    assert str(folder) in str(error.value)
    assert "tokenizer.json" in str(error.value)


def test_a_directory_without_config_names_the_model_inside(folder):
    with pytest.raises(ConfigError, match=r"has no config\.json") as error:
        model_dir(str(folder.parent))

    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_a_built_in_model_is_found_by_name_and_is_small(name):
    folder = model_dir(name)
    assert folder == ASSETS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12_000_000


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4.5), ("Q6_K", 6.5625), ("F16", 0)])
def test_matrices_of_a_gguf_file_take_the_memory_of_their_bits(
    monkeypatch, tmp_path, kind, bits
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    facts = model_facts(str(write_quantised_model(tmp_path / "model", f"gguf {kind}")))
    rest = facts.num_params - facts.num_linear_params

    assert facts.matrix_bits == bits
    assert facts.quantization == ("gguf" if bits else None)
    planned = weight_bytes(facts, "bfloat16", facts.quantization)
    assert planned == int(facts.num_linear_params * (bits or 16) / 8) + 2 * rest
