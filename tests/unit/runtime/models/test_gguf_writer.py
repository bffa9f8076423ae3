"""GGUF files that are written hold the checkpoint that they were made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sylvan.checkpoints.gguf.export import exported
from sylvan.checkpoints.gguf.header import read_model
from sylvan.checkpoints.gguf.recipes import RECIPES, recipe_of
from sylvan.checkpoints.gguf.tokenizer import SPLITS
from sylvan.checkpoints.gguf.tokenizer_export import tokenizer_export
from sylvan.checkpoints.vocab.build import bpe, byte_level
from sylvan.cli.main import main
from sylvan.config.checkpoint import model_dir
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import read_config
from sylvan.runtime.models.files import open_weights
from sylvan.runtime.models.gguf_writer import write_gguf
from sylvan.runtime.models.registry import load_config
from sylvan.text.tokenizer import Tokenizer
from tests.parity.serving import Serving
from tests.support.quantised_models import write_plain_model

pytest.importorskip("gguf")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3} | EXPERTS,
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 3,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    | EXPERTS,
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sapling(folder: Path) -> Path:
    shutil.copytree(model_dir("sapling"), folder)
    return folder


def of_family(folder: Path, kind: str) -> Path:
    """A checkpoint with the tensors of a family, random ones."""
    write_plain_model(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": kind, "head_dim": 16} | FAMILIES[kind]
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    for name in list(tensors):
        stem, _, part = name.rpartition(".self_attn.")
        if kind == "qwen2" and part in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            bias = torch.randn(tensors[name].shape[0], generator=draw)
            tensors[name.removesuffix("weight") + "bias"] = bias
        if kind.startswith("qwen3") and part in ("q_proj.weight", "k_proj.weight"):
            norm = torch.rand(16, generator=draw) + 0.5
            tensors[f"{stem}.self_attn.{part[0]}_norm.weight"] = norm
        if kind in ("mixtral", "qwen3_moe") and ".mlp." in name:
            with_experts(tensors, name, kind, draw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_experts(tensors, name: str, kind: str, draw: torch.Generator) -> None:
    tensors.pop(name)
    stem, _, part = name.rpartition(".mlp.")
    part = part.removesuffix(".weight")
    there = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
    block = f"{stem}.mlp" if kind == "qwen3_moe" else f"{stem}.block_sparse_moe"
    inner = 256 if kind == "qwen3_moe" else 512
    shape = (256, inner) if part == "down_proj" else (inner, 256)
    for expert in range(3):
        last = part if kind == "qwen3_moe" else there
        made = torch.randn(shape, generator=draw) * 0.1
        tensors[f"{block}.experts.{expert}.{last}.weight"] = made
    tensors[f"{block}.gate.weight"] = torch.randn(3, 256, generator=draw)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_holds_the_checkpoint(tmp_path, kind):
    source = of_family(tmp_path / "model", kind)

    write_gguf(source, tmp_path / "out.gguf", "gguf:F32")

    view = model_dir(str(tmp_path / "out.gguf"))
    stored, wanted = open_weights(view), open_weights(source)
    assert set(stored.tensors) == set(wanted.tensors)
    for name in wanted.tensors:
        assert torch.equal(stored.tensor(name), wanted.tensor(name).float()), name
    ours, theirs = load_config(view), load_config(source)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"):
        assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_file_answers_as_its_checkpoint(tmp_path, kind):
    source = of_family(tmp_path / "model", kind)
    write_gguf(source, tmp_path / "out.gguf", "gguf:F32")
    prompts = [[4, 5, 6, 7, 8], [9] * 20]

    found = Serving(model_dir(str(tmp_path / "out.gguf"))).generate(prompts)

    assert found == Serving(source).generate(prompts)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K_M", "Q5_K_S"])
def test_matrices_are_rounded(tmp_path, name):
    source, out = sapling(tmp_path / "model"), tmp_path / "out.gguf"

    written = write_gguf(source, out, f"gguf:{name}")

    header = read_model(out)
    recipe = recipe_of(f"gguf:{name}")
    kinds = {key: tensor.quant.name for key, tensor in header.tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == recipe.kind
    assert kinds["token_embd.weight"] == recipe.head
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert written.num_matrices == sum(kind != "F32" for kind in kinds.values())
    assert written.bytes_after < written.bytes_before
    stored, wanted = open_weights(model_dir(str(out))), open_weights(source)
    for key in wanted.tensors:
        exact = wanted.tensor(key).float()
        assert (stored.tensor(key) - exact).norm() < 0.1 * exact.norm(), key


def test_more_bits_go_to_values_and_down_projections():
    recipe = RECIPES["Q4_K_M"]
    layers = range(16)

    values = [recipe.of(f"blk.{i}.attn_v.weight", i, 16, tied=False) for i in layers]
    small = [RECIPES["Q4_K_S"].of(f"blk.{i}.ffn_down.weight", i, 16, tied=False) for i in layers]

    assert values[:3] == ["Q6_K", "Q6_K", "Q4_K"]
    assert values[-2:] == ["Q6_K", "Q6_K"]
    assert small == ["Q5_K"] * 2 + ["Q4_K"] * 14
    assert recipe.of("output.weight", -1, 16, tied=False) == "Q6_K"
    assert recipe.of("token_embd.weight", -1, 16, tied=False) == "Q4_K"


def test_texts_are_split_as_before(tmp_path):
    source = sapling(tmp_path / "model")
    write_gguf(source, tmp_path / "out.gguf", "gguf:BF16")
    text = "<|im_start|>user\nSort: pear, äpple 123 fig.<|im_end|>\n<think>"

    view = model_dir(str(tmp_path / "out.gguf"))

    mine, theirs = Tokenizer.load(view), Tokenizer.load(source)
    assert mine.encode(text) == theirs.encode(text)
    template = json.loads((source / "tokenizer_config.json").read_text()).get("chat_template")
    theirs_now = json.loads((view / "tokenizer_config.json").read_text())["chat_template"]
    if isinstance(template, str):
        assert theirs_now == [{"name": "default", "template": template}]
    assert "default" in read_model(tmp_path / "out.gguf").metadata["tokenizer.ggml.pre"]


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-2", "tekken", "deepseek-v3"])
def test_ways_to_split_words_have_the_name_of_llama_cpp(tmp_path, name):
    words = SPLITS[name]
    vocab = {chr(97 + i): i for i in range(26)} | {"ab": 26}
    model = bpe(vocab, [("a", "b")], ignore_merges=words.whole_words)
    form = {"type": "NFC"} if words.normal_form else None
    whole = byte_level(model, [], words.patterns, normalizer=form)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))

    found = tokenizer_export(tmp_path, {"vocab_size": 30})

    assert found.values["tokenizer.ggml.pre"] == name
    assert found.values["tokenizer.ggml.merges"] == ["a b"]
    assert found.values["tokenizer.ggml.tokens"][25:] == [
        "z",
        "ab",
        "[PAD27]",
        "[PAD28]",
        "[PAD29]",
    ]
    assert not found.problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "falcon"}, "family 'falcon' cannot be written"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling .*dynamic"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"sliding_window": 16}, "sliding_window is 16"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path, change, words):
    source = write_plain_model(tmp_path / "model")
    raw = read_config(source) | change

    with pytest.raises(ConfigError, match=words):
        exported(raw, open_weights(source).tensors)


def test_nothing_is_left_of_a_file_that_fails(tmp_path):
    source = write_plain_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' are not fin"):
        write_gguf(source, tmp_path / "out.gguf", "gguf:Q8_0")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_the_command_writes_a_file(tmp_path, capsys):
    source, out = sapling(tmp_path / "model"), tmp_path / "s.gguf"

    assert main(["quantize", str(source), str(out), "--format", "gguf:q4_0"]) == 0

    said = capsys.readouterr().out
    assert f"sylvan serve {out}" in said
    assert "note for llama.cpp" in said
    for wrong, words in (
        (["--format", "gguf:Q9"], "'gguf:Q9' is not one of gguf:F32"),
        (["--format", "gguf:Q4_0"], "exists already"),
        (["--format", "fp8", "--quantization", "fp8"], "are synonyms"),
    ):
        assert main(["quantize", str(source), str(out), *wrong]) != 0
        assert words in capsys.readouterr().err
