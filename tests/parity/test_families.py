"""Every family: greedy tokens and log probabilities equal those of transformers, in fp32."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.runtime.executor.facts import check_tensors
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import SHAPE, write
from tests.parity.compare import compare
from tests.parity.families import FALLBACK, FAMILIES, LATENT, SHARED


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers(family, tmp_path):
    model = write(FAMILIES[family](), len(family), tmp_path)
    config = load_config(tmp_path)
    assert config.path != "native" or check_tensors(config, tmp_path)

    found = compare(tmp_path, model, new=32 if family in FALLBACK else 64)

    assert not found.modes
    assert found.excess <= 1


def internlm2_names(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its own names and its grouped projection, from the tensors of Llama."""
    names = {
        "embed_tokens": "tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    if name.endswith("q_proj.weight"):
        q, k, v = (
            tensors[name.replace("q_proj", p)].unflatten(0, (2, -1, 16))
            for p in ("q_proj", "k_proj", "v_proj")
        )
        joined = torch.cat((q, k, v), 1).flatten(0, 2)
        return {name.replace("self_attn.q_proj", "attention.wqkv"): joined}
    found = name
    for old, new in names.items():
        found = found.replace(old, new)
    return {} if "_proj" in found else {found: tensors[name]}


def _baichuan(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One joined projection."""
    if name.endswith("q_proj.weight"):
        parts = [tensors[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
        return {name.replace("q_proj", "W_pack"): torch.cat(parts)}
    return {} if "k_proj" in name or "v_proj" in name else {name: tensors[name]}


@pytest.mark.parametrize(
    ("architecture", "rename", "kv_heads"),
    [("InternLM2ForCausalLM", internlm2_names, 2), ("BaichuanForCausalLM", _baichuan, 4)],
)
def test_renamed_llama_equals_llama(architecture, rename, kv_heads, tmp_path):
    """Architectures that transformers does not have: Llama's tensors under their names."""
    shape = SHAPE | {"num_key_value_heads": kv_heads}
    model = write(transformers.LlamaConfig(**shape), 3, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    found = {}
    for name in tensors:
        found |= rename(name, tensors)
    save_file({k: v.contiguous() for k, v in found.items()}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = [architecture]
    (tmp_path / "config.json").write_text(json.dumps(raw))

    difference = compare(tmp_path, model)

    assert not difference.modes
    assert difference.excess <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("SarvamMoEForCausalLM", "SarvamMoEConfig"),
        ("SarvamMLAForCausalLM", "SarvamMLAConfig"),
        ("IQuestCoderForCausalLM", "IQuestCoderConfig"),
    ],
)
def test_equal_models_are_served_under_their_own_names(architecture, config, tmp_path):
    latent = LATENT | {"q_lora_rank": None, "head_dim": 8} if "MLA" in config else SHARED
    more = {} if "Coder" in config else latent | {"first_k_dense_replace": 1}
    model = write(getattr(transformers, config)(**SHAPE | more), 3, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))

    found = compare(tmp_path, model, new=32)

    assert load_config(tmp_path).path == "native"
    assert not found.modes
    assert found.excess <= 1
