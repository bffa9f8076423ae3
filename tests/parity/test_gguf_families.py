"""A GGUF file of each family gives the model that its checkpoint gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from sylvan.config.checkpoint import model_dir
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.formats import choose
from sylvan.runtime.models.registry import family_of, load_config
from tests.parity.checkpoints import SHAPE
from tests.parity.compare import compare

pytest.importorskip("gguf")

from tests.support import gguf_families as families

SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED = EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "routed_scaling_factor": 1.5,
}
SCALES = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
LAYERS = {"num_hidden_layers": 4}

CASES: dict[str, tuple[str, str, dict[str, Any], tuple[families.Keys, ...]]] = {
    "mixtral": (
        "llama",
        "MixtralConfig",
        {"num_experts_per_tok": 2, "num_local_experts": 4},
        (families.experts,),
    ),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2MoeConfig",
        EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 40},
        (families.experts,),
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeConfig",
        EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 32},
        (families.experts,),
    ),
    "olmoe": (
        "olmoe",
        "OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2},
        (families.experts,),
    ),
    "dots1": ("dots1", "Dots1Config", GROUPED, (families.grouped,)),
    "glm4moe": ("glm4moe", "Glm4MoeConfig", GROUPED | {"use_qk_norm": True}, (families.grouped,)),
    "gemma": ("gemma", "GemmaConfig", {"head_dim": 24}, ()),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        LAYERS | {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 12},
        (families.capped,),
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 12},
        (families.windowed,),
    ),
    "phi3": ("phi3", "Phi3Config", {"sliding_window": 20}, (families.windowed, families.long)),
    "starcoder2": ("starcoder2", "Starcoder2Config", {"sliding_window": None}, ()),
    "stablelm": ("stablelm", "StableLmConfig", {"use_qkv_bias": True}, (families.parallel,)),
    "nemotron": ("nemotron", "NemotronConfig", {}, ()),
    "olmo2": ("olmo2", "Olmo2Config", {}, ()),
    "exaone4": (
        "exaone4",
        "Exaone4Config",
        LAYERS
        | {"sliding_window": 12, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
        (families.windowed,),
    ),
    "granite": ("granite", "GraniteConfig", SCALES, (families.granite,)),
    "smollm3": ("smollm3", "SmolLM3Config", LAYERS, ()),
    "arcee": ("arcee", "ArceeConfig", {}, ()),
    "ernie4_5": ("ernie4_5", "Ernie4_5Config", {"head_dim": 16}, ()),
    "seed_oss": (
        "seed_oss",
        "SeedOssConfig",
        {"head_dim": 16, "attention_bias": True, "attention_out_bias": False},
        (),
    ),
    "glm4": ("glm4", "Glm4Config", {"head_dim": 16, "attention_bias": True}, ()),
    "command-r": ("command-r", "CohereConfig", {"logit_scale": 0.25}, (families.cohere,)),
    "cohere2": (
        "cohere2",
        "Cohere2Config",
        LAYERS | {"logit_scale": 0.25, "sliding_window": 12},
        (families.cohere,),
    ),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(path: Path, case: str, kinds=None, **changes: Any) -> Path:
    """A checkpoint in `path` and its file beside it; returns the file."""
    family, config, fields, keys = CASES[case]
    torch.manual_seed(3)
    made = getattr(transformers, config)(**SHAPE | fields | changes)
    model = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation="eager", dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.1)
    model.eval().save_pretrained(path)
    file = path.with_suffix(".gguf")
    families.write_family(path, file, family, made, keys, kinds)
    return file


def same(found: Any, wanted: Any) -> bool:
    """Equal, numbers as closely as float32 holds them."""
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(found, wanted, rel_tol=1e-6)
    if isinstance(wanted, msgspec.Struct):
        return all(
            same(getattr(found, name), getattr(wanted, name)) for name in wanted.__struct_fields__
        )
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted


@pytest.mark.parametrize("case", CASES)
def test_config_and_weights_are_those_of_the_checkpoint(tmp_path, case):
    file = written(tmp_path / "model", case)
    configs = [load_config(folder) for folder in (model_dir(str(file)), tmp_path / "model")]
    models = []
    for config, folder in zip(configs, (model_dir(str(file)), tmp_path / "model"), strict=True):
        model = family_of(config).model(config, Build(dtype=torch.float32, length=32))
        load_weights(model, folder)
        models.append(model)

    for name in configs[1].__struct_fields__:
        if name != "raw":
            assert same(getattr(configs[0], name), getattr(configs[1], name)), name
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


KINDS = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"}
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}


def test_experts_stay_in_their_blocks(tmp_path):
    file = written(tmp_path / "model", "qwen3moe", KINDS, **WIDE)
    folder = model_dir(str(file))
    config = load_config(folder)
    model = family_of(config).model(config, Build(dtype=torch.bfloat16, length=32))

    load_weights(model, folder, formats=choose(config, None))

    experts = model.layers[0].mlp.experts
    assert all(
        isinstance(getattr(experts, name), CodedWeight) for name in ("gate_up_proj", "down_proj")
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3moe", "gemma2"])
def test_answers_are_those_of_transformers(tmp_path, case):
    file = written(tmp_path / "model", case)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", dtype=torch.float32
    ).eval()

    found = compare(model_dir(str(file)), model)

    assert found.excess <= 1
    assert not found.modes
