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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
}
SCORES = {"mscale": 0.707, "mscale_all_dim": 0.707}
TEMPERED = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
ENDLESS = {"max_position_embeddings": 1 << 20}
SHORT = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
STATES = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}

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
    "qwen2vl": ("qwen2vl", "Qwen2Config", {}, ()),
    "qwen3vl": ("qwen3vl", "Qwen3Config", {"head_dim": 32}, ()),
    "qwen3vlmoe": (
        "qwen3vlmoe",
        "Qwen3MoeConfig",
        EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 32},
        (families.experts,),
    ),
    "exaone": ("exaone", "LlamaConfig", {}, ()),
    "internlm2": ("internlm2", "LlamaConfig", {}, ()),
    "olmo3": (
        "olmo2",
        "Olmo3Config",
        {"sliding_window": 12, "layer_types": SLIDING},
        (families.patterned,),
    ),
    "mistral3": (
        "mistral3",
        "Ministral3Config",
        {"head_dim": 16, "sliding_window": None, "rope_parameters": TEMPERED},
        (families.yarn, families.temperature),
    ),
    "hunyuan-dense": ("hunyuan-dense", "HunYuanDenseV1Config", {"head_dim": 16}, ()),
    "phi2": ("phi2", "PhiConfig", {"num_key_value_heads": 4}, ()),
    "gpt-oss": (
        "gpt-oss",
        "GptOssConfig",
        LAYERS
        | {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 16, "sliding_window": 12}
        | {"rope_parameters": YARN | {"truncate": False}},
        (families.experts, families.inner_experts, families.windowed, families.yarn),
    ),
    "deepseek2": (
        "deepseek2",
        "DeepseekV3Config",
        GROUPED
        | LATENT
        | {"num_key_value_heads": 4, "head_dim": 8, "rope_parameters": YARN | SCORES},
        (
            families.grouped,
            families.latent,
            families.sigmoid,
            families.yarn,
            families.legacy_scores,
        ),
    ),
    "deepseek2-softmax": (
        "deepseek2",
        "DeepseekV2Config",
        GROUPED
        | LATENT
        | {"q_lora_rank": None, "head_dim": 8, "topk_method": "group_limited_greedy"},
        (families.grouped, families.latent),
    ),
    "llama4": (
        "llama4",
        "Llama4TextConfig",
        LAYERS
        | {"num_experts_per_tok": 1, "num_local_experts": 4, "head_dim": 16}
        | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
        (families.experts, families.llama4),
    ),
    "granitemoe": (
        "granitemoe",
        "GraniteMoeSharedConfig",
        SCALES | {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 48},
        (families.granite, families.granite_experts),
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        "HunYuanMoEV1Config",
        {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
        (families.hunyuan,),
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        (families.ernie,),
    ),
    "minimax-m2": (
        "minimax-m2",
        "MiniMaxM2Config",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
        (families.experts, families.inner_experts),
    ),
    "qwen3next": (
        "qwen3next",
        "Qwen3NextConfig",
        LAYERS
        | DELTA
        | EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 40, "norm_topk_prob": True},
        (families.experts, families.delta),
    ),
    "qwen35": ("qwen35", "Qwen3_5TextConfig", LAYERS | DELTA, (families.delta,)),
    "qwen35moe": (
        "qwen35moe",
        "Qwen3_5MoeTextConfig",
        LAYERS | DELTA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40},
        (families.experts, families.delta),
    ),
    "lfm2": ("lfm2", "Lfm2Config", SHORT, (families.short,)),
    "lfm2moe": (
        "lfm2moe",
        "Lfm2MoeConfig",
        SHORT | EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
        (families.short,),
    ),
    "granitehybrid": (
        "granitehybrid",
        "GraniteMoeHybridConfig",
        SCALES
        | STATES
        | {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 48},
        (families.granite, families.granite_experts, families.granite_states),
    ),
    "granitehybrid-dense": (
        "granitehybrid",
        "GraniteMoeHybridConfig",
        SCALES
        | STATES
        | {"num_local_experts": 0, "shared_intermediate_size": 112, "intermediate_size": 112},
        (families.granite, families.granite_experts, families.granite_states),
    ),
    "mamba": (
        "mamba",
        "MambaConfig",
        ENDLESS | {"state_size": 8, "time_step_rank": 4, "intermediate_size": 128},
        (families.pure_states,),
    ),
    "mamba2": (
        "mamba2",
        "Mamba2Config",
        ENDLESS | {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2},
        (families.pure_states,),
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


LIKE_OTHERS = (
    *("deepseek2-softmax", "ernie4_5-moe", "exaone", "granitehybrid-dense", "granitemoe"),
    *("hunyuan-dense", "hunyuan-moe", "internlm2", "lfm2moe", "mamba", "mamba2", "minimax-m2"),
    *("olmo3", "phi2", "qwen2vl", "qwen35moe", "qwen3vl", "qwen3vlmoe"),
)
"""Cases that differ from others by names and numbers only."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.slow] if x in LIKE_OTHERS else []) for x in CASES],
)
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
    if case == "qwen3next":
        ours = with_joined_inputs(ours)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


def with_joined_inputs(split: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs of delta nets as the checkpoint has them: by key head queries, keys, values, gates."""
    found = {}
    groups, key = DELTA["linear_num_key_heads"], DELTA["linear_key_head_dim"]
    for name, tensor in split.items():
        if name.endswith("in_proj_qkv.weight"):
            q, k, v = tensor.split([groups * key, groups * key, len(tensor) - 2 * groups * key])
            parts = q, k, v, split[name.replace("in_proj_qkv", "in_proj_z")]
            heads = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1)
            found[name.replace("in_proj_qkv", "in_proj_qkvz")] = heads.flatten(0, 1)
        elif not name.endswith("in_proj_z.weight"):
            found[name] = tensor
    return found


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


def test_recurrent_layers_stay_in_their_blocks(tmp_path):
    """Inputs of an output projection lie in the file's order, and have the checkpoint's numbers."""
    kinds = {"attn_qkv": "Q4_K", "attn_gate": "Q4_K", "ssm_out": "Q8_0"}
    sizes = {"linear_value_head_dim": 64, "num_hidden_layers": 2}
    file = written(tmp_path / "model", "qwen35", kinds, hidden_size=256, **sizes)
    folder = model_dir(str(file))
    config = load_config(folder)
    models = []
    for formats in (choose(config, None), choose(config, None, by="none")):
        model = family_of(config).model(config, Build(dtype=torch.float32, length=32))
        load_weights(model, folder, formats=formats)
        models.append(model.layers[0].linear_attn)

    kept, plain = models
    for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
        weight = getattr(kept, name).weight
        assert isinstance(weight, CodedWeight), name
        assert (weight.order is not None) == (name == "out_proj")
        torch.testing.assert_close(weight.numbers(), getattr(plain, name).weight)


ANSWERS = ["qwen3moe", "gemma2", "gpt-oss", "deepseek2", "qwen35", "qwen3next", "granitehybrid"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ANSWERS)
def test_answers_are_those_of_transformers(tmp_path, case):
    file = written(tmp_path / "model", case)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", dtype=torch.float32
    ).eval()

    found = compare(model_dir(str(file)), model)

    assert found.excess <= 1
    assert not found.modes
