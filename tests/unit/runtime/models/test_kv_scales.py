"""Scales of keys and values in checkpoints: where they stand, whose they are, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.layers.mesh import Share
from sylvan.runtime.models.kv_scales import brings_kv_scales, read_kv_scales
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.models.safetensors import Checkpoint
from tests.parity.checkpoints import VOCAB, make
from tests.parity.serving import Serving

E4M3 = torch.float8_e4m3fn
EVERYTHING = LogprobOptions(token_ids=tuple(range(VOCAB)))
K0 = "model.layers.0.self_attn.k_scale"
WAYS = {
    "compressed-tensors": "model.layers.{}.self_attn.{}_scale",
    "its attention module": "model.layers.{}.self_attn.attn.{}_scale",
    "its older files, and Quark": "model.layers.{}.self_attn.{}_proj.output_scale",
    "ModelOpt": "model.layers.{}.self_attn.{}_proj.{}_scale",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make("llama", path)
    return path


def with_scales(model_dir, folder, tensors, **settings):
    """A copy of the checkpoint with these tensors and this `quantization_config`."""
    folder.mkdir(exist_ok=True)
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(load_file(model_dir / "model.safetensors") | tensors, folder / "model.safetensors")
    if settings:
        raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
        (folder / "config.json").write_text(json.dumps(raw))
    return folder


def numbered(way, layers, scale):
    return {way.format(i, side, side): scale(i, side) for i in range(layers) for side in "kv"}


BOTH = Share(2, 0, 2)


def read(folder, heads=BOTH, kind=E4M3):
    return read_kv_scales(Checkpoint(folder), load_config(folder), heads, kind)


@pytest.mark.parametrize("way", WAYS)
def test_they_are_found_by_the_names_of_the_tools(model_dir, tmp_path, way):
    layers = load_config(model_dir).num_hidden_layers
    tensors = numbered(WAYS[way], layers, lambda i, side: torch.tensor(0.5 + i + (side == "v")))

    found = read(with_scales(model_dir, tmp_path / "m", tensors))

    assert {i: s.keys.tolist() for i, s in found.items()} == {
        i: [0.5 + i] * 2 for i in range(layers)
    }
    assert found[1].values.tolist() == [2.5, 2.5]


def test_one_scale_may_be_of_both_and_heads_may_have_their_own(model_dir, tmp_path):
    layers = load_config(model_dir).num_hidden_layers
    both = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([0.25]) for i in range(layers)}
    found = read(with_scales(model_dir, tmp_path / "m", both))
    assert found[0].keys.tolist() == found[0].values.tolist() == [0.25, 0.25]

    heads = numbered(
        WAYS["compressed-tensors"], layers, lambda i, side: torch.tensor([1.0, 2.0]).view(2, 1, 1)
    )
    with_scales(model_dir, tmp_path / "m", heads)
    assert read(tmp_path / "m")[0].keys.tolist() == [1.0, 2.0]
    assert read(tmp_path / "m", Share(2, 1, 1))[0].keys.tolist() == [2.0]  # of the second rank
    halved = read(tmp_path / "m", kind=torch.float8_e4m3fnuz)
    assert halved[0].keys.tolist() == [2.0, 4.0]  # that type reaches about half as far


def test_without_any_there_are_none(model_dir):
    assert read(model_dir) == {}


@pytest.mark.parametrize(
    ("settings", "are"),
    [
        ({}, True),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, False),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_quant_algo": "NVFP4"}, False),
    ],
)
def test_only_those_of_e4m3_are_meant(settings, are):
    assert brings_kv_scales({"quantization_config": settings}) is are


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.update({K0: torch.tensor(float("nan"))}), "0.self_attn.k_scale' has scales"),
        (lambda t: t.update({K0: torch.tensor(0.0)}), "not positive"),
        (lambda t: t.update({K0: torch.ones(3)}), r"k_scale' is \[3\] .* the 2 key heads"),
        (lambda t: t.update({K0: torch.ones(1, dtype=torch.int32)}), "of torch.int32"),
        (lambda t: t.pop(K0), "'model.layers.0.self_attn.v_scale', but no k_scale"),
        (lambda t: (t.pop(K0), t.pop(K0.replace("k_", "v_"))), "none for layer 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(model_dir, tmp_path, change, sentence):
    layers = load_config(model_dir).num_hidden_layers
    tensors = numbered(WAYS["compressed-tensors"], layers, lambda i, side: torch.ones(1))
    change(tensors)

    with pytest.raises(ConfigError, match=sentence):
        read(with_scales(model_dir, tmp_path / "m", tensors))


@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_servers_store_by_them(model_dir, tmp_path, runner):
    """Scales so small that all saturate change the answer; those of powers of two do not."""
    layers = load_config(model_dir).num_hidden_layers
    prompts, options = [[5, 6, 7, 8] * 5], {"kv_dtype": "fp8_e4m3"}

    def logprobs(folder, **changed):
        serving = Serving(folder, runner=runner, options=options | changed)
        rid = serving.add(prompts[0], max_new_tokens=4, logprobs=EVERYTHING)
        serving.run()
        return [out.logprobs.chosen_logprobs for out in serving.outputs[rid]]

    def folder(scale):
        tensors = numbered(WAYS["compressed-tensors"], layers, lambda i, side: torch.tensor(scale))
        return with_scales(model_dir, tmp_path / f"of {scale}", tensors)

    near = np.concatenate(logprobs(folder(0.015625)))
    exact = np.concatenate(logprobs(model_dir, kv_dtype="model"))
    far = np.concatenate(logprobs(folder(1e-6)))
    ignored = np.concatenate(logprobs(folder(1e-6), kv_dtype="model"))
    error = np.abs(near - exact).mean()
    assert 0 < error < 0.2
    assert np.abs(far - exact).mean() > 2 * error
    assert np.array_equal(ignored, exact)


def test_programs_and_pytorch_store_alike(model_dir, tmp_path):
    layers = load_config(model_dir).num_hidden_layers
    heads = torch.tensor([0.02, 0.005])
    tensors = numbered(WAYS["compressed-tensors"], layers, lambda i, side: heads.clone())
    folder = with_scales(model_dir, tmp_path / "m", tensors)
    found = []
    for runner in ("auto", "eager"):
        serving = Serving(folder, runner=runner, options={"kv_dtype": "fp8_e4m3"})
        rid = serving.add([5, 6, 7, 8] * 5, max_new_tokens=4, logprobs=EVERYTHING)
        serving.run()
        found.append(np.concatenate([o.logprobs.chosen_logprobs for o in serving.outputs[rid]]))

    np.testing.assert_allclose(*found, atol=0.02)
