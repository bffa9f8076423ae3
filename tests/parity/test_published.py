"""Architectures that transformers does not have equal their published computation, in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.facts import check_tensors
from sylvan.runtime.models.registry import load_config
from tests.parity.compare import compare
from tests.parity.published_models import PUBLISHED
from tests.parity.published_more import STEP

OFTEN = {"chatglm", "deepseek", "qwen"}
PROGRAMS = {"mistral4", "mistral-large3", "phi3-small", "rwkv5", "rwkv6", "rwkv7"}
"""Families with layers that few others have, which run as whole programs."""


@pytest.mark.parametrize(
    "name",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED],
)
def test_family_equals_its_published_computation(name, tmp_path):
    model = PUBLISHED[name].make(len(name))
    model.write(tmp_path)
    assert check_tensors(load_config(tmp_path), tmp_path)

    found = compare(tmp_path, model, new=32)

    if name in PROGRAMS and describe().variant is not None:
        assert found.runner.startswith("program (")
        assert "PyTorch" not in found.runner
    assert not found.modes
    assert found.excess <= 1


def test_reference_of_xlstm_equals_transformers(tmp_path):
    model = PUBLISHED["xlstm"].make(4)
    model.write(tmp_path)
    theirs = transformers.xLSTMForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(4, 44)[None]

    with torch.inference_mode():
        assert torch.allclose(model(ids).logits, theirs(ids, use_cache=False).logits, atol=1e-3)


def test_reference_of_step_equals_transformers(tmp_path):
    """Transformers has the layers as a part of Step 3.7, without a head of their own."""
    model = PUBLISHED["step3.5"].make(4)
    text = {name: value for name, value in STEP.items() if name != "architectures"}
    named = {"moe_num_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok"}
    text = {named.get(name, name): value for name, value in text.items()}
    text["num_key_value_heads"] = text.pop("num_attention_groups")
    theirs = transformers.Step3p7TextModel(transformers.Step3p7TextConfig(**text)).eval()
    tensors = {name.replace("/", "."): t.data for name, t in model.tensors.items()}
    theirs.load_state_dict(dict(_of_transformers(tensors)))
    ids = torch.arange(4, 44)[None]

    with torch.inference_mode():
        hidden = theirs(ids, use_cache=False).last_hidden_state
        logits = hidden @ tensors["lm_head.weight"].T
        assert torch.allclose(model(ids).logits, logits, atol=1e-4)


def _of_transformers(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The names that transformers gives to tensors of a published checkpoint."""
    renamed = {
        ".moe.gate.weight": ".mlp.gate.weight",
        ".moe.router_bias": ".mlp.gate.e_score_correction_bias",
        ".moe.down_proj.weight": ".mlp.experts.down_proj",
        ".share_expert.": ".mlp.shared_experts.",
    }
    for name, tensor in tensors.items():
        if name == "lm_head.weight" or ".moe.up_proj" in name:
            continue
        if ".moe.gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            found = name.replace(".moe.gate_proj.weight", ".mlp.experts.gate_up_proj")
            yield found.removeprefix("model."), torch.cat((tensor, up), 1)
            continue
        found = name
        for old, new in renamed.items():
            found = found.replace(old, new)
        yield found.removeprefix("model."), tensor


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
        ("decilm", {"num_key_value_heads_per_layer": "4"}, "block_configs or num_key_value"),
        ("phi3-small", {"blocksparse_vert_stride": 0}, "blocksparse_vert_stride must be positive"),
        ("phi3-small", {"rope_position_scale": 2.0}, "other activations, or scaled positions"),
        ("rwkv6", {"head_size": 7}, "heads of 7 columns must divide hidden_size 64"),
        ("step3.5", {"layer_types": ["full_attention"]}, "layer_types must have an entry for each"),
        ("step3.5", {"moe_layers_enum": "x"}, "moe_layers_enum must list layers"),
    ],
)
def test_impossible_configs_are_refused_by_field(name, change, words, tmp_path):
    model = PUBLISHED[name].make(4)
    model.raw = model.raw | change
    model.write(tmp_path)

    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path)
