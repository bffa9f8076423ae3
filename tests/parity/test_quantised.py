"""Quantised checkpoints against transformers with the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from tests.parity.checkpoints import SHAPE
from tests.parity.compare import compare
from tests.parity.families import EXPERT
from tests.parity.serving import Serving
from tests.parity.test_ranks import check_ranks
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
}


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
        if tensor.dim() < 2 or "layers." not in name or name.endswith("mlp.gate.weight"):
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
    "case", [*CASES, "bnb-nf4-double", "bnb-fp4", "hqq-4", "torchao-8da4w", "quark-mxfp4", "mxfp8"]
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
