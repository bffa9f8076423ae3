"""Models in GGUF files against transformers with the weights that the files hold (fp32)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sylvan.checkpoints.gguf.quants import READ
from sylvan.cli.main import main
from sylvan.config.checkpoint import model_dir, model_facts
from sylvan.kernels.native.library import describe
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.executor.facts import read_facts
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.files import open_weights
from sylvan.runtime.models.formats import choose
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.text.tokenizer import Tokenizer
from tests.parity.checkpoints import LLAMA3_ROPE, SHAPE, VOCAB
from tests.parity.compare import compare
from tests.parity.rounding import Exact
from tests.parity.serving import Serving

pytest.importorskip("gguf")

from tests.support import gguf_files
from tests.support.ggml_blocks import WRITTEN_OUT, decoded

WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "llama-tied": lambda: transformers.LlamaConfig(
        **WIDE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**WIDE | {"tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE | {"head_dim": 32}),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def nothing(out) -> None:
    """No further metadata."""


def made(path: Path, name: str, kind: str, more=nothing, kinds=None, **changes):
    torch.manual_seed(3)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            parameter.data += torch.randn_like(parameter) * 0.1
    gguf_files.write_model(model.eval(), path, name.partition("-")[0], kind, more, kinds)
    return model


@pytest.mark.slow
def test_weights_are_those_of_the_file(tmp_path):
    for kind in READ:
        model = made(tmp_path / f"{kind}.gguf", "llama", kind)
        weights = open_weights(model_dir(str(tmp_path / f"{kind}.gguf")))
        state = model.state_dict()

        assert set(weights.tensors) == set(state)
        assert all(torch.equal(weights.tensor(n).float(), state[n]) for n in state), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "Q4_K"), ("llama-tied", "F32"), ("qwen2", "Q8_0"), ("qwen3", "Q5_0")],
)
def test_gguf_equals_transformers(tmp_path, name, kind):
    model = made(tmp_path / "m.gguf", name, kind)

    found = compare(_as_float32(model_dir(str(tmp_path / "m.gguf"))), model)

    assert found.excess <= 1
    assert found.modes == ()


MIXTURES = {
    "as Q4_K_M": {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"},
    "one that is dequantised": {"k_proj": "IQ4_NL", "up_proj": "F16", "embed_tokens": "Q6_K"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", MIXTURES.values(), ids=MIXTURES)
def test_matrices_of_several_kinds_equal_transformers(tmp_path, kinds):
    model = made(tmp_path / "m.gguf", "llama", "Q4_K", kinds=kinds)

    found = compare(_as_float32(model_dir(str(tmp_path / "m.gguf"))), model)

    assert found.excess <= 1
    assert not found.modes


def test_matrices_stay_in_their_bits(tmp_path):
    made(tmp_path / "m.gguf", "llama-tied", "Q8_0")
    folder = model_dir(str(tmp_path / "m.gguf"))
    config = load_config(folder)
    model = family_of(config).model(config, Build(dtype=torch.bfloat16, length=32))

    load_weights(model, folder, formats=choose(config, None))

    layer = model.layers[0]
    kept = [layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, model.lm_head, model.embed_tokens]
    assert {str(part.weight.form) for part in kept} == {"int8 codes in groups of 32"}
    assert not choose(config, None, by="none").blocks
    assert not choose(config, "w8a8").blocks


def _as_float32(folder: Path) -> Path:
    """The same with config.json asking for float32, as `--dtype float32` does."""
    config = (folder / "config.json").read_text()
    for name in ("bfloat16", "float16"):
        config = config.replace(f'"{name}"', '"float32"')
    (folder / "config.json").write_text(config)
    return folder


def test_llama3_frequencies_come_from_their_factors(tmp_path):
    rope = {"rope_parameters": LLAMA3_ROPE}
    config = transformers.LlamaConfig(**WIDE | rope)
    inv, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = LLAMA3_ROPE["rope_theta"] ** -(torch.arange(0, 64, 2) / 64)

    def factors(out) -> None:
        out.add_tensor("rope_freqs.weight", (plain / inv).numpy().astype(np.float32))

    model = made(tmp_path / "m.gguf", "llama", "F32", factors, **rope)
    # The file holds quotients in float32, so that a frequency comes back but for its last bits.
    # At position 100 that is 3e-6 of an angle, which makes 6e-5 of a log probability here. Nothing
    # else is lost on the way: the model with the file's frequencies, as it has the file's weights,
    # is matched as closely as any other.
    of_file = 1.0 / (
        (plain / inv).float() * LLAMA3_ROPE["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    )
    assert 0 < ((of_file - inv) / inv).abs().max() < 4 * torch.finfo(torch.float32).eps
    model.model.rotary_emb.inv_freq.copy_(of_file)

    found = compare(model_dir(str(tmp_path / "m.gguf")), model)
    assert found.excess <= 1
    assert found.modes == ()


HALF = 0.1 * np.log(4.0) + 1.0
"""YaRN's factor of cosines and sines for texts four times as long."""


@pytest.mark.parametrize(
    ("kind", "more", "changes"),
    [
        ("yarn", {"attn_factor": 0.7}, {"attention_factor": 0.7 * HALF}),
        ("yarn", {"yarn_attn_factor": 0.8}, {"attention_factor": 0.8}),
        ("yarn", {"attn_factor": 1.3, "yarn_attn_factor": 0.8}, {"attention_factor": 1.04}),
        (
            "yarn",
            {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0},
            {"beta_fast": 8.0, "beta_slow": 2.0},
        ),
        ("none", {"attn_factor": 1.3}, {"attention_factor": 1.3, "factor": 1.0}),
        ("linear", {"attn_factor": 1.3}, {"attention_factor": 1.3}),
    ],
)
def test_what_positions_are_multiplied_by_comes_from_the_metadata(tmp_path, kind, more, changes):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    if kind != "yarn":  # transformers has a factor on cosines with this rule only
        factors = [rope["factor"] if kind == "linear" else 1.0] * 32
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        rope |= {"original_max_position_embeddings": 256}

    def scaling(out) -> None:
        out.add_rope_scaling_type(gguf_files.gguf.RopeScalingType(kind))
        out.add_rope_scaling_factor(4.0)
        out.add_rope_scaling_orig_ctx_len(64)
        for name, value in more.items():
            out.add_float32(f"llama.rope.scaling.{name}", value)

    path = tmp_path / "m.gguf"
    model = made(path, "llama", "F32", scaling, rope_parameters=rope | changes)
    ids = list(range(4, 44))
    expected, explained = Exact(model).rows(ids)
    serving = Serving(model_dir(str(path)))
    rid = serving.add(ids, logprobs=LogprobOptions(start=0, token_ids=tuple(range(VOCAB))))
    serving.run()

    (first, *_) = serving.outputs[rid]
    found = np.concatenate(
        [first.prompt_logprobs.chosen_logprobs[1:], first.logprobs.chosen_logprobs]
    )
    assert len(found) == len(expected)
    assert (np.abs(found - expected).max(1) <= explained).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_come_from_the_metadata(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 64} if kind == "yarn" else {}

    def scaling(out) -> None:
        out.add_rope_scaling_type(gguf_files.gguf.RopeScalingType(kind))
        out.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            out.add_rope_scaling_orig_ctx_len(64)

    model = made(tmp_path / "m.gguf", "llama", "F32", scaling, rope_parameters=rope)

    found = compare(model_dir(str(tmp_path / "m.gguf")), model)
    assert found.excess <= 1
    assert found.modes == ()


@pytest.mark.parametrize("kind", sorted(WRITTEN_OUT))
def test_a_block_is_what_ggml_says(tmp_path, kind):
    made(tmp_path / "m.gguf", "llama", kind)
    weights = open_weights(model_dir(str(tmp_path / "m.gguf")))
    name = "model.layers.0.mlp.up_proj.weight"
    stored = weights.tensors[name]
    data = stored.file.read_bytes()[stored.start : stored.stop]
    block, size = gguf_files.gguf.GGML_QUANT_SIZES[gguf_files.Kind[kind]]
    parts = [data[i : i + size] for i in range(0, len(data), size)][: 512 // block]

    found = weights.tensor(name).flatten()[:512].numpy()
    assert np.abs(found).mean() > 1e-3, "a block of zeros shows nothing"
    assert np.allclose(found, np.concatenate([decoded(kind, p) for p in parts]), atol=1e-6)


def test_dtype_and_sizes_are_known_before_loading(tmp_path):
    made(tmp_path / "a.gguf", "qwen2", "Q8_0")
    made(tmp_path / "b.gguf", "llama", "F16")
    eight, half = (model_facts(str(tmp_path / f"{name}.gguf")) for name in "ab")

    assert (eight.weights, eight.dtype, half.dtype) == ("gguf", "bfloat16", "float16")
    assert eight.num_params == sum(
        int(np.prod(t.shape)) for t in open_weights(model_dir(eight.name)).tensors.values()
    )


def test_gguf_is_quantised_while_loading(tmp_path):
    made(tmp_path / "m.gguf", "llama", "Q8_0")
    folder = model_dir(str(tmp_path / "m.gguf"))

    kept = Serving(folder, runner="auto", options={"dtype": "float32"})
    eight = Serving(folder, options={"dtype": "float32", "quantization": "w8a8"})

    plain = read_facts(folder, "float32").weight_bytes
    assert eight.facts.weight_bytes < 0.6 * plain
    assert kept.facts.weight_bytes < 0.6 * plain or describe().variant is None
    assert len(eight.generate([[4, 5, 6]], max_new_tokens=4)[0]) == 4


@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_a_quantised_copy_is_the_same_model(tmp_path, capsys, name):
    made(tmp_path / "m.gguf", "qwen2", "Q8_0")
    file, out = str(tmp_path / "m.gguf"), tmp_path / "out"
    prompts = [[4, 5, 6], [9] * 20]

    assert main(["quantize", file, str(out), "--quantization", name]) == 0

    assert f"sylvan serve {out}" in capsys.readouterr().out
    direct = Serving(model_dir(file), options={"quantization": name})
    copy = Serving(model_dir(str(out)))
    assert copy.facts.weight_bytes == direct.facts.weight_bytes
    assert copy.generate(prompts) == direct.generate(prompts)
    assert model_facts(str(out)).weights == "safetensors"
    whole, again = Tokenizer.load(model_dir(file)), Tokenizer.load(out)
    assert again.encode("w5 w9") == whole.encode("w5 w9")
    assert again.eos_ids == whole.eos_ids
