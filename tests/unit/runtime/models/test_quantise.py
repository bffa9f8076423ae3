from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.quality.fidelity import SAPLING, Predictor, held_out, losses
from sylvan.cli.main import main
from sylvan.kernels.matmul.weights import Int4Weight, Int8Weight, quantise_int4, quantise_int8
from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.formats import UNSPECIFIED, choose, stored_format
from sylvan.runtime.models.formats.compressed_tensors import (
    quantization_config,
    stored_as,
    stored_by_scheme,
)
from sylvan.runtime.models.quantise import convert, format_of, matrices, weight_bytes
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.models.writer import write_quantised

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "dtype": "bfloat16",
}
LAYER = "model.layers.0."


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (40, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (40, 64),
        LAYER + "input_layernorm.weight": (64,),
        LAYER + "post_attention_layernorm.weight": (64,),
        LAYER + "self_attn.q_proj.weight": (64, 64),
        LAYER + "self_attn.k_proj.weight": (32, 64),
        LAYER + "self_attn.v_proj.weight": (32, 64),
        LAYER + "self_attn.o_proj.weight": (64, 64),
        LAYER + "mlp.gate_proj.weight": (96, 64),
        LAYER + "mlp.up_proj.weight": (96, 64),
        LAYER + "mlp.down_proj.weight": (64, 96),
    }
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.bfloat16() for name, tensor in made.items()}


@pytest.fixture
def model_dir(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(RAW))
    (path / "tokenizer.json").write_text("{}")
    save_file(tensors(), path / "model.safetensors", metadata={"format": "pt"})
    return path


def empty(model_dir, device="cpu"):
    config = load_config(model_dir)
    build = Build(dtype=torch.bfloat16, length=32, device=torch.device(device))
    return family_of(config).model(config, build)


def loaded(model_dir, quantization=None):
    model = empty(model_dir)
    formats = choose(load_config(model_dir), quantization)
    load_weights(model, model_dir, formats=formats)
    return model


def weights_of(model):
    layer = model.layers[0]
    return [
        layer.self_attn.qkv_proj.weight,
        layer.self_attn.o_proj.weight,
        layer.mlp.gate_up_proj.weight,
        layer.mlp.down_proj.weight,
        model.lm_head.weight,
    ]


@pytest.mark.parametrize(("name", "kind"), [("w8a8", Int8Weight), ("int4", Int4Weight)])
def test_layers_take_the_format_and_the_head_takes_8_bits(model_dir, name, kind):
    model = loaded(model_dir, name)

    *body, head = weights_of(model)

    assert {type(w) for w in body} == {kind}
    assert isinstance(head, Int8Weight)
    assert isinstance(model.embed_tokens.weight, torch.Tensor)
    joined = torch.cat([tensors()[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv"])
    rounded = convert("x", joined, format_of(name).bits)
    assert body[0].q.equal(rounded.q)
    assert body[0].scale.equal(rounded.scale)


@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_bytes_of_quantised_weights_are_known_before_loading(model_dir, name):
    model = empty(model_dir, "meta")
    wanted = format_of(name)
    found = loaded(model_dir, name)

    plain = sum(p.numel() * 2 for p in found.parameters())
    matrices_bytes = sum(w.q.nbytes + w.scale.nbytes for w in weights_of(found))

    # groups of 32 where 64 does not divide have twice the scales
    assert weight_bytes(model, wanted, 2) == pytest.approx(plain + matrices_bytes, rel=0.02)
    assert len(dict(matrices(model, wanted))) == 5


def test_a_name_of_a_stored_format_only_checks_it(model_dir):
    raw = RAW | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    (model_dir / "config.json").write_text(json.dumps(raw))
    config = load_config(model_dir)

    for name in ("w8a8_fp8", "fp8"):
        assert choose(config, name) == choose(config, None)
    with pytest.raises(
        ConfigError,
        match=r"awq names the format of a checkpoint, but this one is quantised by 'fp8'",
    ):
        choose(config, "awq")
    (model_dir / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(
        ConfigError, match=r"gptq names the format of a checkpoint, but this one is not quantised"
    ):
        choose(load_config(model_dir), "gptq")


SCHEMES = ("fp8-block", "mxfp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "fp8", *SCHEMES])
def test_a_written_checkpoint_is_the_same_model(model_dir, tmp_path, name):
    model_dir = one_group(model_dir)
    seen = []
    written = write_quantised(model_dir, tmp_path / "out", name, lambda *at: seen.append(at))

    direct, stored_ = loaded(model_dir, name), loaded(tmp_path / "out")

    for a, b in zip(weights_of(direct), weights_of(stored_), strict=True):
        assert type(a) is type(b)
        if not isinstance(a, torch.Tensor):
            assert a.form == b.form
            assert all(x.equal(y) for x, y in zip(a.tensors, b.tensors, strict=True))
    assert written.num_matrices == 7
    assert written.bytes_after < written.bytes_before
    assert seen[-1][0] == seen[-1][1] == written.bytes_before
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    kept = choose(load_config(tmp_path / "out"), None).loaded
    assert kept.bits == format_of(name).bits
    assert kept.name == name or not name.startswith("w")


def one_group(model_dir):
    """The same model with inputs that all divide into groups of 64."""
    weights = tensors()
    for x in ("gate", "up"):
        weights[f"{LAYER}mlp.{x}_proj.weight"] = torch.ones(128, 64).bfloat16()
    weights[LAYER + "mlp.down_proj.weight"] = torch.ones(64, 128).bfloat16()
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    (model_dir / "config.json").write_text(json.dumps(RAW | {"intermediate_size": 128}))
    return model_dir


def test_groups_that_differ_cannot_be_written(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"groups of \d+ and of \d+"):
        write_quantised(model_dir, tmp_path / "out", "w4a8")

    assert list(tmp_path.iterdir()) == [model_dir]


def test_nothing_is_written_over(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="exists already"):
        write_quantised(model_dir, model_dir, "w8a8")


def test_a_quantised_checkpoint_is_not_quantised_again(model_dir, tmp_path):
    write_quantised(model_dir, tmp_path / "out", "w8a8")

    with pytest.raises(ConfigError, match="quantised already"):
        write_quantised(tmp_path / "out", tmp_path / "again", "w8a8")
    with pytest.raises(ConfigError, match="is w8a8 already, not w4a8"):
        choose(load_config(tmp_path / "out"), "w4a8")


def test_pickled_weights_are_quantised_when_asked_for(model_dir, tmp_path, capsys):
    out, pickled = tmp_path / "out", tmp_path / "pickled"
    write_quantised(model_dir, out, "w8a8")
    torch.save(tensors(), model_dir / "pytorch_model.bin")
    (model_dir / "model.safetensors").unlink()

    assert main(["quantize", str(model_dir), str(pickled)]) != 0
    assert "--load-format pt reads them" in capsys.readouterr().err
    assert not pickled.exists()
    assert main(["quantize", str(model_dir), str(pickled), "--load-format", "pt"]) == 0
    assert main(["quantize", str(model_dir), str(pickled), "--load-format", "dummy"]) != 0
    assert "expected auto | safetensors" in capsys.readouterr().err

    first, second = (load_file(path / "model.safetensors") for path in (out, pickled))
    assert first.keys() == second.keys()
    assert all(tensor.equal(second[name]) for name, tensor in first.items())
    assert {path.name for path in pickled.iterdir()} == {path.name for path in out.iterdir()}


def test_models_that_run_through_transformers_are_not_quantised(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    raw = {"model_type": "cohere2_moe", "num_attention_heads": 4, "num_key_value_heads": 2}
    (path / "config.json").write_text(
        json.dumps(sizes | raw | {"architectures": ["Cohere2MoeForCausalLM"]})
    )

    with pytest.raises(ConfigError, match="models that run through transformers"):
        write_quantised(path, tmp_path / "out", "w8a8")
    assert list(tmp_path.iterdir()) == [path]


def test_infinite_weights_are_refused_while_writing(model_dir, tmp_path):
    weights = tensors()
    weights[LAYER + "mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(weights, model_dir / "model.safetensors")

    with pytest.raises(ConfigError, match=r"mlp\.up_proj\.weight' are not finite"):
        write_quantised(model_dir, tmp_path / "out", "w8a8")
    assert list(tmp_path.iterdir()) == [model_dir]


def test_inputs_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(ConfigError, match=r"'layers.0.x' has 112 inputs.*choose w8a8"):
        convert("layers.0.x", torch.zeros(4, 112), 4)


@pytest.mark.parametrize("weight", [quantise_int8, lambda w: quantise_int4(w, 32)])
def test_stored_tensors_are_read_back(weight):
    made = weight(torch.randn(48, 96, generator=torch.Generator().manual_seed(1)))
    tensors_ = stored_as("a.weight", made)

    found = UNSPECIFIED.read(
        "a.weight", UNSPECIFIED.parts_of("a.weight", tensors_), tensors_.__getitem__
    )

    assert type(found) is type(made)
    assert found.q.equal(made.q)
    assert found.scale.equal(made.scale)


@pytest.mark.parametrize("name", ["w4a16", "fp8", *SCHEMES])
def test_stored_codes_are_read_back_by_what_config_says(name):
    wanted = format_of(name)
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    made = convert("x", weight, wanted.bits, wanted)
    settings = quantization_config(wanted, made.form.group or None, ["lm_head"])
    reader, tensors_ = stored_format({"quantization_config": settings}), stored_as("a.weight", made)
    if wanted.scheme is not None:
        tensors_ = stored_by_scheme("a.weight", made, weight, wanted.scheme)

    found = reader.read("a.weight", reader.parts_of("a.weight", tensors_), tensors_.__getitem__)

    assert found.form == made.form
    assert all(x.equal(y) for x, y in zip(found.tensors, made.tensors, strict=True))
    error = (found.numbers() - weight).abs().max() / weight.abs().max()
    # scales of MX are powers of two: the largest number may be above the largest code, by an eighth
    # of it for e4m3 and a quarter for e2m1
    clipped = {"mxfp8": 1 / 8, "mxfp4": 1 / 4}
    assert error < clipped.get(name, 0.05 if wanted.bits == 8 else 0.17)


def test_eight_bits_in_words_are_read():
    q = torch.arange(-128, 128).to(torch.int8).view(4, 64)
    words = (q.to(torch.int16) + 128).to(torch.uint8).view(torch.int32)
    found = {"w_packed": words, "w_scale": torch.ones(4, 1), "w_shape": torch.tensor([4, 64])}

    assert UNSPECIFIED.read("w", UNSPECIFIED.parts_of("w", found), found.__getitem__).q.equal(q)


def test_one_scale_a_row_is_repeated_for_groups():
    made = quantise_int4(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), 64)
    found = stored_as("w", made)

    got = UNSPECIFIED.read("w", UNSPECIFIED.parts_of("w", found), found.__getitem__)

    assert got.group == 64
    assert got.scale.equal(made.scale)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_scale": torch.full((64, 1), float("nan"))}, "weight_scale' are not finite"),
        ({"weight_scale": torch.ones(3, 1)}, r"weight_scale' is \[3, 1\], but 64 x 64 numbers"),
        ({"weight": torch.zeros(64, 64, dtype=torch.int16)}, "torch.int16"),
        ({"weight": torch.zeros(64, 32, dtype=torch.int8)}, "implies a linear layer of"),
        ({"weight_zero_point": torch.zeros(64)}, "has the tensor .*weight_zero_point"),
    ],
)
def test_broken_quantised_tensors_are_named(model_dir, tmp_path, changes, words):
    write_quantised(model_dir, tmp_path / "out", "w8a8")
    file = tmp_path / "out" / "model.safetensors"
    stem = LAYER + "self_attn.o_proj."
    save_file(load_file(file) | {stem + name: t for name, t in changes.items()}, file)

    with pytest.raises(ConfigError, match=words) as error:
        loaded(tmp_path / "out")
    assert "o_proj" in str(error.value)


def test_a_part_that_is_not_quantised_is_named(model_dir, tmp_path):
    write_quantised(model_dir, tmp_path / "out", "w8a8")
    file = tmp_path / "out" / "model.safetensors"
    found, name = load_file(file), LAYER + "self_attn.k_proj.weight"
    del found[name + "_scale"]
    save_file(found | {name: tensors()[name]}, file)

    with pytest.raises(ConfigError, match=r"k_proj\.weight' is not quantised"):
        loaded(tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "exl3", "bits": 4}, "quantised by 'exl3'"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        ("w8a8", "must be an object"),
    ],
)
def test_other_quantisations_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        stored_format({"quantization_config": settings})


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True},
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 24, "symmetric": True},
        {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
        {"num_bits": 6, "type": "int", "strategy": "channel", "symmetric": True},
    ],
)
def test_schemes_without_a_kernel_are_refused(weights):
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    with pytest.raises(
        ConfigError, match=r"config_groups\.group_0: weights are .* kernels for integers"
    ):
        stored_format({"quantization_config": settings})


MIXTURE = RAW | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}


@pytest.fixture
def mixture_dir(model_dir):
    (model_dir / "config.json").write_text(json.dumps(MIXTURE))
    found = {name: t for name, t in tensors().items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(1)
    shapes = {"mlp.gate.weight": (3, 64), "self_attn.q_norm.weight": (32,)}
    shapes |= {"self_attn.k_norm.weight": (32,)}
    for n in range(3):
        for part, shape in (("gate", (64, 64)), ("up", (64, 64)), ("down", (64, 64))):
            shapes[f"mlp.experts.{n}.{part}_proj.weight"] = shape
    made = {LAYER + name: torch.randn(s, generator=generator) for name, s in shapes.items()}
    found |= {name: t.bfloat16() for name, t in made.items()}
    save_file(found, model_dir / "model.safetensors", metadata={"format": "pt"})
    return model_dir


@pytest.mark.parametrize("model", ["model_dir", "mixture_dir"])
def test_devices_quantise_what_they_have_kernels_for(model, tmp_path, request):
    path = request.getfixturevalue(model)
    write_quantised(path, tmp_path / "out", "w8a8")
    plain, stored = load_config(path), load_config(tmp_path / "out")

    assert choose(plain, "fp8", by="triton").loaded.name == "fp8"
    assert not choose(stored, None, by="triton").plain
    assert choose(stored, None, by="none").plain
    with pytest.raises(ConfigError, match="quantization=w8a8 quantises activations to 8 bits, on"):
        choose(plain, "w8a8", by="triton")
    with pytest.raises(ConfigError, match="quantization=fp8: only CPUs, and GPUs with Triton"):
        choose(plain, "fp8", by="none")


@pytest.mark.parametrize(("name", "kind"), [("w8a8", Int8Weight), ("w4a8", Int4Weight)])
def test_experts_are_quantised_while_loading_or_before(mixture_dir, tmp_path, name, kind):
    write_quantised(mixture_dir, tmp_path / "out", name)
    stored_file = load_file(mixture_dir / "model.safetensors")

    layers = [loaded(mixture_dir, name).layers[0].mlp, loaded(tmp_path / "out").layers[0].mlp]

    for mlp in layers:
        assert isinstance(mlp.gate.weight, torch.Tensor)
        for expert in range(3):
            stem = f"{LAYER}mlp.experts.{expert}."
            parts = [stored_file[f"{stem}{part}_proj.weight"] for part in ("gate", "up")]
            wanted = convert("x", torch.cat(parts), format_of(name).bits)
            found = mlp.experts.gate_up_proj[expert]
            assert isinstance(found, kind)
            assert found.q.equal(wanted.q)
            assert found.scale.equal(wanted.scale)
    assert layers[0].experts.down_proj.q.equal(layers[1].experts.down_proj.q)


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_the_built_in_model_loses_little():
    names = None, "w8a8", "w4a8", "w4a16", "fp8", "nvfp4"
    predictors = [Predictor("float32"), *(Predictor("bfloat16", name) for name in names)]
    predictors += [Predictor("bfloat16", kv=kind) for kind in ("int8", "int4")]

    exact, bf16, w8a8, w4a8, w4a16, fp8, nvfp4, int8_kv, int4_kv = losses(predictors, held_out(1))

    assert bf16.kl < 1e-3
    assert w8a8.kl < 5e-3
    assert int8_kv.kl < 2e-3
    assert int8_kv.kl < int4_kv.kl < 0.05
    assert w4a8.kl < 5e-2
    assert w4a16.kl < 5e-2
    assert fp8.kl < 5e-3
    assert nvfp4.kl < 5e-2
    assert w8a8.perplexity < 1.01 * exact.perplexity
    assert w4a8.perplexity < 1.05 * exact.perplexity
    assert w4a8.same_top > 0.97
    assert 0 < bf16.kl < w8a8.kl < w4a8.kl


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_the_built_in_model_is_written_and_predicts_alike(tmp_path):
    write_quantised(SAPLING, tmp_path / "out", "w4a8")
    direct, written = Predictor("bfloat16", "w4a8"), Predictor("bfloat16", model=tmp_path / "out")
    text = held_out(1)[0]

    found, again = (torch.cat([*p.log_probs(text.ids, text.rows)]) for p in (direct, written))
    assert found.equal(again)
