"""Checkpoints that transformers reads: refused for what our own loading refuses, by name."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.fallback import TransformersModel
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import write
from tests.parity.rare import ALL
from tests.support.own_code import write_own_code

OPTIONS = LocalOptions(page_size=16, num_pages=8, max_batch_tokens=32, max_running_reqs=2)
LAYER = "model.layers.1."
OUT = LAYER + "self_attn.dense.weight"
NORM = LAYER + "input_layernorm.weight"
EXPERT = LAYER + "mlp.experts.3.up_proj.weight"


def load(path, *, dtype=torch.float32, pickled=False, **options):
    config = load_config(path, **options)
    assert config.path == "transformers"
    model = TransformersModel(config, Build(dtype=dtype, length=64, device=torch.device("cpu")))
    model.load(path, pickled=pickled)
    return model


def respoil(path, spoil):
    weights = load_file(path / "model.safetensors")
    spoil(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.fixture
def plain(tmp_path):
    write(ALL["persimmon"](), 3, tmp_path)
    return tmp_path


@pytest.fixture
def experts(tmp_path):
    write(ALL["cohere2-moe"](), 3, tmp_path)
    return tmp_path


def put(name, value):
    return lambda weights: weights.update({name: value(weights[name])})


WRONG = {
    "missing": (lambda w: w.pop(OUT), f"lacks the tensor '{OUT}'$"),
    "two missing": (lambda w: [w.pop(OUT), w.pop(NORM)], f"lacks the tensor '{NORM}' and 1 more$"),
    "extra": (
        lambda w: w.update({"model.extra.weight": torch.ones(1)}),
        "has the tensor 'model.extra.weight', which this architecture does not use$",
    ),
    "shape": (
        put(OUT, lambda t: t[:2].clone()),
        rf"'{OUT}' has shape \[2, 64\], but config.json implies \[64, 64\]$",
    ),
    "not a number": (put(OUT, lambda t: t.fill_(float("nan"))), f"'{OUT}' are not finite"),
    "infinite": (put(NORM, lambda t: t.fill_(float("inf"))), f"'{NORM}' are not finite"),
    "integers": (put(OUT, lambda t: t.to(torch.int8)), f"'{OUT}' is stored as torch.int8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tensors_are_refused_by_name(plain, what, caplog):
    spoil, words = WRONG[what]
    respoil(plain, spoil)

    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match=words) as caught:
        load(plain)

    assert "\n" not in str(caught.value)
    assert "LOAD REPORT" not in caplog.text


def test_the_server_does_not_start_with_them(plain):
    respoil(plain, lambda w: w.pop(OUT))

    with pytest.raises(ConfigError, match=OUT):
        build_executor(plain, OPTIONS)


def test_overflow_in_conversion_is_refused(plain):
    respoil(plain, put(NORM, lambda t: t.fill_(1e6)))

    with pytest.raises(ConfigError, match=r"not finite .* as torch.float16"):
        load(plain, dtype=torch.float16)


def test_truncated_file_names_the_first_lost_tensor(plain):
    file = plain / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(ConfigError, match=r"is truncated: tensor '.*' ends at byte"):
        load(plain)


def test_index_that_names_more_than_there_is_is_refused(plain):
    weights = load_file(plain / "model.safetensors")
    places = dict.fromkeys(weights, "model.safetensors") | {"model.more": "model.safetensors"}
    index = plain / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))

    with pytest.raises(ConfigError, match=r"tensor 'model.more' is missing from model.safetensors"):
        load(plain)


def test_pickled_files_are_held_to_the_same(plain):
    weights = load_file(plain / "model.safetensors")
    weights[OUT][3, 4] = float("nan")
    (plain / "model.safetensors").unlink()
    torch.save(weights, plain / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=f"'{OUT}' are not finite"):
        load(plain, pickled=True)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.pop(EXPERT), "layers.1.mlp.experts.gate_up_proj"),
        (put(EXPERT, lambda t: t[:, :4].clone()), "layers.1.mlp.experts.gate_up_proj"),
        (put(EXPERT, lambda t: t.fill_(float("inf"))), "gate_up_proj' are not finite"),
    ],
)
def test_wrong_experts_name_the_stack_that_they_are_part_of(experts, spoil, words):
    respoil(experts, spoil)

    with pytest.raises(ConfigError, match=words) as caught:
        load(experts)
    assert "\n" not in str(caught.value)


def test_code_of_a_checkpoint_is_held_to_the_same(tmp_path):
    path = write_own_code(tmp_path / "own")
    name = next(n for n in load_file(path / "model.safetensors") if "attention" in n)
    load(path, trusted=True)
    respoil(path, lambda w: w.pop(name))

    with pytest.raises(ConfigError, match=f"lacks the tensor '{name}'"):
        load(path, trusted=True)


def test_derived_buffers_are_ignored(plain):
    extra = {LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(2)}
    respoil(plain, lambda w: w.update(extra))

    load(plain)


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_may_be_stored_or_not(experts, stored):
    def both(weights):
        weights.pop("lm_head.weight", None)
        if stored:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    respoil(experts, both)

    inner = load(experts).inner
    assert inner.lm_head.weight is inner.model.embed_tokens.weight


def test_vectors_need_no_head(plain):
    respoil(plain, lambda w: w.pop("lm_head.weight"))

    load(plain, headless=True)
    with pytest.raises(ConfigError, match=r"lacks the tensor 'lm_head.weight'"):
        load(plain)
