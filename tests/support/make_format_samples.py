"""Writes the samples in `tests/support/format_samples`, by the tools that define the formats.

    python -m venv --system-site-packages tools
    tools/bin/pip install --no-deps bitsandbytes torchao hqq
    tools/bin/python -m tests.support.make_format_samples

A sample is a safetensors file with the tensors of one matrix `a.weight` as its tool stores them,
and `numbers`, what the tool takes them for. Its metadata have config.json's quantization_config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "format_samples"
ROWS, COLS = 32, 128


def linear() -> torch.nn.Linear:
    layer = torch.nn.Linear(COLS, ROWS, bias=False)
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1)) * 0.05
    layer.weight.data = weight
    return layer


def save(
    name: str, tensors: dict[str, torch.Tensor], numbers: torch.Tensor, said: dict[str, Any]
) -> None:
    FOLDER.mkdir(exist_ok=True)
    contents = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    contents["numbers"] = numbers.detach().float().contiguous().clone()
    save_file(contents, FOLDER / f"{name}.safetensors", metadata={"config": json.dumps(said)})


def of_bitsandbytes() -> None:
    import bitsandbytes as bnb

    for kind in ("nf4", "fp4"):
        for double in (False, True):
            state = {"compress_statistics": double, "quant_type": kind}
            weight = bnb.nn.Params4bit(linear().weight.data, requires_grad=False, **state)
            layer = bnb.nn.Linear4bit(COLS, ROWS, bias=False, **state)
            layer.weight = weight
            layer = layer.to("cpu")
            packed = layer.weight
            numbers = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
            stored = {"a." + key: value for key, value in layer.state_dict().items()}
            said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
            said |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
            save(f"bnb-{kind}{'-double' if double else ''}", stored, numbers, said)
    q, most, _ = bnb.functional.int8_vectorwise_quant(linear().weight.data.half())
    stored = {"a.weight": q, "a.SCB": most, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    numbers = bnb.functional.int8_vectorwise_dequant(q, most)
    save("bnb-int8", stored, numbers, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def of_torchao() -> None:
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
        quantize_,
    )

    configs = {
        "int8": Int8WeightOnlyConfig(version=2),
        "fp8": Float8WeightOnlyConfig(),
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "int8-rows": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
        "8da4w": Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(64)
        ),
    }
    for name, config in configs.items():
        model = torch.nn.ModuleDict({"a": linear()})
        quantize_(model, config)
        stored, _ = flatten_tensor_state_dict(model.state_dict())
        said = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}}
        save(f"torchao-{name}", stored, model["a"].weight.dequantize(), said)


def of_hqq() -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits in (8, 4, 3, 2):
        wanted = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
        layer = HQQLinear(linear(), wanted, compute_dtype=torch.float32, device="cpu")
        stored = {"a." + key: value for key, value in layer.state_dict().items()}
        stored = {key: value for key, value in stored.items() if value is not None}
        said = {"quant_method": "hqq", "quant_config": wanted}
        save(f"hqq-{bits}", stored, layer.dequantize(), said)


if __name__ == "__main__":
    of_bitsandbytes()
    of_torchao()
    of_hqq()
