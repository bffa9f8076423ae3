"""Architectures that transformers does not have equal their published computation, in fp32."""

from __future__ import annotations

import pytest
import torch
import transformers

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.facts import check_tensors
from sylvan.runtime.models.registry import load_config
from tests.parity.compare import compare
from tests.parity.published_models import PUBLISHED

OFTEN = {"chatglm", "deepseek", "qwen"}


@pytest.mark.parametrize(
    "name",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED],
)
def test_family_equals_its_published_computation(name, tmp_path):
    model = PUBLISHED[name].make(len(name))
    model.write(tmp_path)
    assert check_tensors(load_config(tmp_path), tmp_path)

    found = compare(tmp_path, model, new=32)

    assert not found.modes
    assert found.excess <= 1


def test_reference_of_xlstm_equals_transformers(tmp_path):
    model = PUBLISHED["xlstm"].make(4)
    model.write(tmp_path)
    theirs = transformers.xLSTMForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(4, 44)[None]

    with torch.inference_mode():
        assert torch.allclose(model(ids).logits, theirs(ids, use_cache=False).logits, atol=1e-3)


def test_references_notice_what_differs():
    """A base of rotary positions that is 1 % off is another model."""
    family = PUBLISHED["qwen"]
    model = family.make(4)
    ids = torch.arange(4, 44)[None]
    right = model(ids).logits

    model.raw = family.raw | {"rotary_emb_base": 10_100}

    assert (model(ids).logits - right).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("chatglm", {"rmsnorm": False}, "rmsnorm"),
        ("qwen", {"intermediate_size": 7}, "intermediate_size must be even"),
        ("rwkv7", {"head_dim": 7}, "head_dim 7 does not divide hidden_size 64"),
        ("solar", {"bskcn_1": [9]}, "bskcn_1 must list layers"),
        ("nemotron-nas", {"block_configs": [{}]}, "1 block_configs for 5 layers"),
        ("nemotron-nas", {"block_configs": [{"ffn": {"ffn_mult": "x"}}] * 5}, "block_configs"),
        ("decilm", {"num_key_value_heads_per_layer": "4"}, "block_configs nor key heads"),
    ],
)
def test_impossible_configs_are_refused_by_field(name, change, words, tmp_path):
    model = PUBLISHED[name].make(4)
    model.raw = model.raw | change
    model.write(tmp_path)

    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path)
