"""Models whose scales are moved before rounding: the same model, and rounding costs less."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sylvan.cli.main import main
from sylvan.kernels.matmul.smoothing import InputStatistics, awq_scales, smoothquant_scales
from sylvan.kernels.matmul.weights import quantise_int4_codes, quantise_int8
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.smooth import smoothed
from sylvan.runtime.models.writer import write_quantised
from tests.parity.serving import Serving
from tests.support import random_model

TEXTS = [[5, 9, 200, 31, 7, 8] * 6, list(range(40, 110)), [3] * 20]
PROMPT = [[5, 9, 200, 31], [7] * 20]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model some of whose inputs are much larger than others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "INNER", 64)  # so that all inputs divide into groups of 64
        path = random_model.write_random_model(tmp_path_factory.mktemp("model"), context_len=256)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[:4] *= 40
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_the_scaled_model_is_the_same_model(model_dir, tmp_path, method):
    seen = []
    changed = smoothed(method, model_dir, TEXTS, tmp_path / "scales", lambda *at: seen.append(at))
    scaled = copy_with(model_dir, tmp_path / "scaled", changed)

    one, other = (
        Serving(path, options={"dtype": "float32"}).generate(PROMPT, max_new_tokens=8)
        for path in (model_dir, scaled)
    )

    assert one == other
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert any(name.endswith("input_layernorm.weight") for name in changed)
    assert any("gate_proj" in name for name in changed)
    assert any("down_proj" in name for name in changed) == (method == "awq")


def copy_with(model_dir, out, changed):
    tensors = load_file(model_dir / "model.safetensors")
    for name, tensor in changed.items():
        stored = name if name in tensors else f"model.{name}"
        assert not torch.equal(tensors[stored], tensor), name
        tensors[stored] = tensor
    out.mkdir()
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def rows_with_outliers() -> torch.Tensor:
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    return rows * torch.where(torch.arange(64) < 3, 50.0, 1.0)


def test_awq_loses_less_than_rounding_alone():
    x = rows_with_outliers()
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
    seen = InputStatistics(64)
    seen.add(x[:120])
    seen.add(x[120:])
    scales = awq_scales(weight, seen, 64)

    plain = x @ (quantise_int4_codes(weight, 64).numbers() - weight).T
    found = x @ (quantise_int4_codes(weight * scales, 64).numbers() / scales - weight).T

    assert found.square().mean() < 0.5 * plain.square().mean()


def test_smoothquant_loses_less_where_rows_are_rounded():
    x = rows_with_outliers()
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
    seen = InputStatistics(64)
    seen.add(x)
    scales = smoothquant_scales(weight, seen)

    def loss(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        levels = rows.abs().amax(1, keepdim=True) / 127
        rounded = (rows / levels).round() * levels
        return (rounded @ quantise_int8(matrix).numbers().T - x @ weight.T).square().mean()

    assert loss(x / scales, weight * scales) < 0.5 * loss(x, weight)


def test_an_interrupted_run_gives_the_same(model_dir, tmp_path):
    whole = smoothed("awq", model_dir, TEXTS, tmp_path / "a")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smoothed("awq", model_dir, TEXTS, tmp_path / "b", stop)
    assert len([*(tmp_path / "b").glob("*/awq/layer-*.safetensors")]) == 1
    resumed = smoothed("awq", model_dir, TEXTS, tmp_path / "b")

    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(("name", "bits"), [("w4a16-awq", 4), ("w8a8-smoothquant", 8)])
def test_the_command_writes_a_copy_that_is_served(model_dir, tmp_path, capsys, name, bits):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    out = tmp_path / "out"
    given = ["--quantization", name, "--calibration", str(text), "--tokens", "200"]

    assert main(["quantize", str(model_dir), str(out), *given]) == 0

    assert f"sylvan serve {out}" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    assert not out.with_name("out.calibrated").exists()
    assert len(Serving(out).generate(PROMPT, max_new_tokens=4)[0]) == 4
    stored, before = (load_file(path / "model.safetensors") for path in (out, model_dir))
    norm = next(name for name in stored if name.endswith("input_layernorm.weight"))
    assert not torch.equal(stored[norm], before[norm])


def test_texts_are_needed_and_norms_too(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="w8a8-smoothquant needs texts of at least two tokens"):
        smoothed("smoothquant", model_dir, [[1]], tmp_path)
    raw = json.loads((model_dir / "config.json").read_text())
    after = copy_with(model_dir, tmp_path / "after", {})
    tensors = load_file(after / "model.safetensors")
    kept = {}
    for name, tensor in tensors.items():
        other = name.replace("post_attention_layernorm", "post_feedforward_layernorm")
        kept[other.replace("input_layernorm", "post_attention_layernorm")] = tensor
    for layer in range(raw["num_hidden_layers"]):
        stem = f"model.layers.{layer}.self_attn."
        kept[stem + "q_norm.weight"] = torch.ones(64)
        kept[stem + "k_norm.weight"] = torch.ones(32)
    save_file(kept, after / "model.safetensors", metadata={"format": "pt"})
    raw |= {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    (after / "config.json").write_text(json.dumps(raw))

    with pytest.raises(ConfigError, match="Olmo2ForCausalLM has no norms of its own before"):
        smoothed("awq", after, TEXTS, tmp_path)


def test_a_changed_tensor_takes_the_place_of_the_stored_one(model_dir, tmp_path):
    name = "model.norm.weight"
    changed = {"norm.weight": torch.full((64,), 2.0)}

    write_quantised(model_dir, tmp_path / "out", "w8a8", given=changed)

    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored[name], changed["norm.weight"])
