"""Quantised checkpoints against transformers with the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.layers.placement import ExpertPlacement
from tests.parity.checkpoints import SHAPE
from tests.parity.compare import compare
from tests.parity.families import EXPERT
from tests.parity.serving import Serving
from tests.parity.test_ranks import CLOSE, EVERYTHING, check_ranks
from tests.support.adapters import AdapterServing, write_random_adapter
from tests.support.quantised import CASES, TOOLS
from tests.support.ranks import build_ranks

WIDE = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **WIDE,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
    ),
    "deepseek-v3": EXPERT["deepseek-v3"],
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **WIDE,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        norm_topk_prob=True,
    ),
    "cohere-qk-norm": lambda: transformers.CohereConfig(**WIDE, use_qk_norm=True),
}
_PLAIN = ("mlp.gate.weight", "shared_expert_gate.weight")


def written(path: Path, model: str, case: str) -> transformers.PreTrainedModel:
    """Write a checkpoint of a format; returns the model with the numbers that it holds."""
    torch.manual_seed(3)
    whole = transformers.AutoModelForCausalLM.from_config(
        MODELS[model](), attn_implementation="eager", dtype=torch.float32
    )
    whole.save_pretrained(path)
    plain = load_file(path / "model.safetensors")
    make, arguments, settings = {**CASES, **TOOLS}[case]
    tensors, numbers = {}, {}
    for seed, (name, tensor) in enumerate(plain.items()):
        if tensor.dim() != 2 or "layers." not in name or name.endswith((*_PLAIN, "_norm.weight")):
            tensors[name] = tensor
            continue
        made = make(tuple(tensor.shape), seed, **arguments)
        stem = name.removesuffix("weight")
        tensors |= {stem + end: part for end, part in made.parts.items()}
        if case == "fp8-tensor":
            tensors[stem + "input_scale"] = torch.ones(())
        numbers[name] = made.numbers
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    dense = path.with_name("dense")
    whole.save_pretrained(dense)
    save_file(plain | numbers, dense / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(
        dense, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(*CASES, "bnb-nf4-double", "bnb-fp4", "hqq-4", "torchao-8da4w", "quark-mxfp4", "mxfp8"),
        *("mlx-4", "blockwise-int8"),
    ],
)
def test_answers_are_those_of_the_numbers(tmp_path, case):
    model = written(tmp_path / "model", "llama", case)

    found = compare(tmp_path / "model", model)

    assert found.excess <= 1
    assert not found.modes
    assert found.runner.startswith("program") or describe().variant is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3-moe", "gptq"),
        ("qwen3-moe", "gptq-order-asym"),
        ("qwen3-moe", "awq"),
        ("deepseek-v3", "fp8-block"),
    ],
)
def test_experts_are_those_of_the_numbers(tmp_path, family, case):
    model = written(tmp_path / "model", family, case)

    found = compare(tmp_path / "model", model)

    assert found.excess <= 1
    assert not found.modes
    assert found.runner.startswith("program") or describe().variant is None


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gptq", "fp8-block"])
def test_recurrent_layers_are_those_of_the_numbers(tmp_path, case):
    model = written(tmp_path / "model", "qwen3-next", case)

    found = compare(tmp_path / "model", model, new=24)

    assert found.excess <= 1
    assert not found.modes


def test_models_of_transformers_get_the_numbers(tmp_path):
    model = written(tmp_path / "model", "cohere-qk-norm", "gptq")

    served = Serving(tmp_path / "model")
    dense = Serving(tmp_path / "dense")

    prompts = [[4, 5, 6, 7, 8], [9] * 20]
    assert served.generate(prompts) == dense.generate(prompts)
    assert served.facts.runner == dense.facts.runner
    assert model.config.use_qk_norm
    with pytest.raises(ConfigError, match="run through transformers cannot be quantised"):
        Serving(tmp_path / "dense", options={"quantization": "w8a8"})


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_recurrent_layers_answer_the_same_however_they_are_batched(tmp_path, name):
    torch.manual_seed(3)
    config = transformers.Lfm2Config(
        **SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    prompts = [[4, 5, 6], [9] * 20, [7, 8]]

    plain = Serving(tmp_path / "model", runner="auto")
    one = Serving(tmp_path / "model", runner="auto", options={"quantization": name})
    together = one.generate(prompts)

    assert one.facts.weight_bytes < plain.facts.weight_bytes
    assert [one.generate([prompt])[0] for prompt in prompts] == together


@pytest.mark.parametrize(
    ("family", "case"),
    [("llama", "gptq"), ("llama", "awq"), ("llama", "fp8-rows"), ("qwen3-moe", "gptq-2")],
)
def test_matrices_are_divided_between_two_ranks(tmp_path, family, case):
    written(tmp_path / "model", family, case)

    check_ranks(tmp_path / "model", 2)


def test_inputs_in_an_order_of_their_own_are_not_divided(tmp_path):
    written(tmp_path / "model", "llama", "gptq-order-asym")

    with pytest.raises(ConfigError, match=r"o_proj\.weight' has inputs in groups of 128.* 64 of"):
        Serving(tmp_path / "model", build=build_ranks(2))


@pytest.mark.parametrize("case", ["gptq-2", "fp8-block"])
def test_whole_experts_are_spread_over_two_ranks(tmp_path, case):
    written(tmp_path / "model", "qwen3-moe", case)
    one = Serving(tmp_path / "model")

    def mesh_of(rank):
        return Mesh(rank, 2, ExpertPlacement(2))

    two = Serving(tmp_path / "model", build=build_ranks(2, mesh_of=mesh_of))

    prompts = [[4, 5, 6, 7, 8], [9] * 20]
    assert two.generate(prompts, max_new_tokens=6) == one.generate(prompts, max_new_tokens=6)
    two.close()
    assert two.executor.lost == []


@pytest.mark.parametrize("case", ["gptq-order-asym", "fp8-block"])
def test_adapters_change_a_quantised_base_as_they_change_its_numbers(tmp_path, case):
    written(tmp_path / "model", "llama", case)
    adapter = write_random_adapter(tmp_path / "adapter", tmp_path / "dense", 1)

    def rows(name: str, lora: str | None) -> np.ndarray:
        serving = AdapterServing(tmp_path / name, {"a": adapter})
        rid = serving.ask([4, 5, 6, 7, 8], lora, logprobs=EVERYTHING, max_new_tokens=1)
        serving.run()
        return np.concatenate([out.logprobs.chosen_logprobs for out in serving.outputs[rid]])

    found = rows("model", "a")

    assert np.abs(found - rows("dense", "a")).max() < CLOSE
    assert np.abs(found - rows("model", None)).max() > 10 * CLOSE
