"""Calibrated quantisation: it loses less, and an interrupted run continues."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from sylvan.cli.main import main
from sylvan.kernels.matmul.weights import CodedWeight, quantise_int4_codes
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.calibrate import calibrated
from sylvan.runtime.models.writer import write_quantised
from tests.parity.serving import Serving
from tests.support import random_model

TEXTS = [[5, 9, 200, 31, 7, 8] * 6, list(range(40, 110)), [3] * 20]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "INNER", 64)  # so that all inputs divide into groups of 64
        return random_model.write_random_model(tmp_path_factory.mktemp("model"), context_len=256)


def test_every_matrix_of_the_layers_is_rounded(model_dir, tmp_path):
    seen = []
    found = calibrated(model_dir, TEXTS, tmp_path, lambda *at: seen.append(at))

    stored = load_file(model_dir / "model.safetensors")
    wanted = {name for name in stored if "layers." in name and stored[name].dim() == 2}
    assert {f"model.{name}" for name in found} == wanted
    assert seen[-1][0] == seen[-1][1] == len(seen)
    name = next(iter(found))
    numbers = stored[f"model.{name}"].float()
    plain = quantise_int4_codes(numbers, found[name].group)
    error = (found[name].numbers() - numbers).abs().mean()
    assert 0 < error < 3 * (plain.numbers() - numbers).abs().mean()


def test_an_interrupted_run_gives_the_same(model_dir, tmp_path):
    whole = calibrated(model_dir, TEXTS, tmp_path / "a")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrated(model_dir, TEXTS, tmp_path / "b", stop)
    assert len([*(tmp_path / "b").glob("*/layer-*.safetensors")]) == 1
    resumed = calibrated(model_dir, TEXTS, tmp_path / "b")

    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        assert torch.equal(weight.q, resumed[name].q)
        assert torch.equal(weight.scale, resumed[name].scale)


def test_the_copy_that_is_written_is_served(model_dir, tmp_path, capsys):
    made = calibrated(model_dir, TEXTS, tmp_path / "layers")
    write_quantised(model_dir, tmp_path / "out", "w4a16", given=made)

    serving = Serving(tmp_path / "out", options={"dtype": "float32"})

    assert len(serving.generate([[5, 9, 200]], max_new_tokens=4)[0]) == 4
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name, weight = next(iter(made.items()))
    assert isinstance(weight, CodedWeight)
    assert torch.equal(stored[f"model.{name}_scale"], weight.scale)


def test_texts_are_needed(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="texts of at least two tokens"):
        calibrated(model_dir, [[1]], tmp_path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--quantization", "fp8", "--calibration", "x"], "--calibration is used by w4a16-gptq"),
        (["--quantization", "w4a16-gptq", "--tokens", "1"], "--tokens: expected a number from 2"),
        (["--quantization", "w4a16-gptq", "--calibration", "/none"], "--calibration: cannot read"),
    ],
)
def test_wrong_options_are_named(model_dir, tmp_path, capsys, more, words):
    assert main(["quantize", str(model_dir), str(tmp_path / "out"), *more]) != 0

    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
