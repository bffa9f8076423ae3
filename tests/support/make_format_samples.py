"""Writes the samples in `tests/support/format_samples` with the tools that define the formats.

    python -m venv --system-site-packages tools
    tools/bin/pip install --no-deps bitsandbytes torchao hqq autoawq auto-round gptqmodel \\
        mlx[cpu] mlx-cpu llmcompressor nvidia-modelopt amd-quark
    tools/bin/python -m tests.support.make_format_samples [TOOL ...]

Some tools need further packages, which their errors name. The samples are of bitsandbytes 0.50,
torchao 0.18, HQQ 0.2.8, AutoAWQ 0.2.9, AutoRound 0.16, GPTQModel 7.7, MLX 0.32, LLM Compressor
0.14, ModelOpt 0.47 and Quark 0.13.

A sample is a safetensors file with the tensors of one matrix `a.weight` as its tool stores them,
and `numbers`, the dequantised values by the tool. Its metadata contain config.json's
quantization_config.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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


def levels(
    bits: int, group: int, *, middle: bool
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Return a linear layer, with scales and zero points of its groups: (outputs, groups)."""
    layer = linear()
    parts = layer.weight.data.unflatten(1, (-1, group))
    most = (1 << bits) - 1
    if middle:
        scales = parts.abs().amax(2) / (most // 2)
        zeros = torch.full_like(scales, most // 2 + 1)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round()
    return layer, scales.half().float(), zeros


def of_autoawq() -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    layer, scales, zeros = levels(4, 64, middle=False)
    made = WQLinear_GEMM.from_linear(layer, 4, 64, scales=scales.T, zeros=zeros.T)
    numbers = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, 64).T
    said = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    said["version"] = "gemm"
    save("autoawq", {"a." + k: v for k, v in made.state_dict().items()}, numbers, said)


def of_autoround() -> None:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    packings = {"auto_round": qlinear_torch, "auto_round:auto_gptq": qlinear_torch_zp}
    for packing, module in packings.items():
        for bits, middle in ((4, True), (4, False), (2, False), (8, True)):
            layer, scales, zeros = levels(bits, 32, middle=middle)
            made = module.QuantLinear(bits, 32, COLS, ROWS, False)
            made.device = torch.device("cpu")
            made.pack(layer, scales, zeros, None, device="cpu")
            numbers = made(torch.eye(COLS)).T
            said = {"quant_method": "auto-round", "packing_format": packing, "bits": bits}
            said |= {"group_size": 32, "sym": middle}
            stored = {"a." + key: value for key, value in made.state_dict().items()}
            name = f"autoround-{packing.rpartition(':')[2]}-{bits}{'' if middle else '-asym'}"
            save(name, stored, numbers, said)


def of_gptqmodel() -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    order = torch.arange(COLS) // 32
    mixed = order[torch.randperm(COLS, generator=torch.Generator().manual_seed(2))]
    for bits, middle, moved in (
        (4, True, False),
        (4, False, True),
        (3, False, False),
        (8, True, False),
    ):
        layer, scales, zeros = levels(bits, 32, middle=middle)
        index = (mixed if moved else order).int()
        made = TorchLinear(bits, 32, middle, moved, COLS, ROWS)
        made.pack_original(layer, scales, zeros, index)
        made.post_init()
        numbers = made.dequantize_weight().T
        for layout in ("gptq_v2", "gptq"):
            if layout == "gptq":
                about = QuantizeConfig(bits=bits, group_size=32, sym=middle, desc_act=moved)
                convert_gptq_v2_to_v1_format_module(made, about)
            kept = ("qweight", "qzeros", "scales", "g_idx")
            stored = {f"a.{key}": getattr(made, key) for key in kept}
            said = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": middle}
            said |= {"desc_act": moved, "checkpoint_format": layout}
            save(f"gptqmodel-{layout}-{bits}{'-order' if moved else ''}", stored, numbers, said)


def of_mlx() -> None:
    import mlx.core as mx

    weight = mx.array(linear().weight.data.numpy())
    for bits, group in ((2, 32), (3, 64), (4, 64), (6, 32), (8, 128)):
        parts = mx.quantize(weight, group_size=group, bits=bits)
        numbers = mx.dequantize(*parts, group_size=group, bits=bits)
        names = ("weight", "scales", "biases")
        stored = {
            f"a.{name}": torch.from_dlpack(part) for name, part in zip(names, parts, strict=True)
        }
        said = {"quant_method": "mlx", "bits": bits, "group_size": group}
        save(f"mlx-{bits}", stored, torch.from_dlpack(numbers), said)


@contextmanager
def model() -> Iterator[tuple[Any, Path]]:
    """Return a Llama of one layer with random weights, and an empty folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": COLS, "intermediate_size": 256, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(f"{folder}/plain")
        plain = LlamaForCausalLM.from_pretrained(f"{folder}/plain", dtype=torch.float32)
        yield plain.eval(), Path(folder, "written")


def save_of_model(name: str, folder: Path, numbers: torch.Tensor) -> None:
    """Save the layer, as `a`, from a checkpoint in `folder`."""
    stem = "model.layers.0.self_attn.k_proj."
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    stored = {"a." + key.removeprefix(stem): x for key, x in found.items() if key.startswith(stem)}
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    save(name, stored, numbers, said)


def of_llmcompressor() -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import (
        AutoModelForCausalLM,
        CompressedTensorsConfig,
        PreTrainedTokenizerFast,
    )

    known = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    words = PreTrainedTokenizerFast(tokenizer_object=known)
    for scheme in (
        "W4A16",
        "W4A16_ASYM",
        "W8A16",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "NVFP4A16",
        "MXFP4A16",
    ):
        with model() as (tiny, folder):
            how = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
            oneshot(tiny, recipe=how, tokenizer=words)
            tiny.save_pretrained(folder, save_compressed=True)
            opened = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                quantization_config=CompressedTensorsConfig(run_compressed=False),
            )
            numbers = opened.model.layers[0].self_attn.k_proj.weight
            save_of_model(f"llmcompressor-{scheme.lower()}", folder, numbers)


def of_modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    rows = torch.arange(64)[None]
    for name, config in (
        ("fp8", mtq.FP8_DEFAULT_CFG),
        ("fp8-channel", mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG),
    ):
        with model() as (tiny, folder):
            made = mtq.quantize(tiny, config, lambda it: it(rows))
            layer = made.model.layers[0].self_attn.k_proj
            numbers = layer.weight_quantizer(layer.weight.float())
            export_hf_checkpoint(made, export_dir=folder)
            save_of_model(f"modelopt-{name}", folder, numbers)
    # Its models in NVFP4 need a GPU; the tensors do not.
    held, scale, whole = NVFP4QTensor.quantize(linear().weight.data, 16)
    numbers = held.dequantize(
        torch.float32, fast=False, scale=scale, double_scale=whole, block_sizes={-1: 16}
    )
    stored = {"a.weight": held._quantized_data, "a.weight_scale": scale, "a.weight_scale_2": whole}
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    save("modelopt-nvfp4", stored, numbers, said)


def of_quark() -> None:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config.config import (
        FP8E4M3PerChannelSpec,
        FP8E4M3PerTensorSpec,
        Int8PerTensorSpec,
        OCP_MXFP4Spec,
        QConfig,
        QLayerConfig,
    )

    specs = {
        "fp8": FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "fp8-channel": FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
        "int8": Int8PerTensorSpec(
            observer_method="min_max",
            symmetric=True,
            scale_type="float",
            round_method="half_even",
            is_dynamic=False,
        ),
        "mxfp4": OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    for name, spec in specs.items():
        with model() as (tiny, folder):
            config = QConfig(QLayerConfig(weight=spec.to_quantization_spec()), exclude=["lm_head"])
            quantizer = ModelQuantizer(config)
            made = quantizer.freeze(quantizer.quantize_model(tiny))
            layer = made.model.layers[0].self_attn.k_proj
            numbers = layer.get_quant_weight(layer.weight)
            export_safetensors(made, str(folder))
            save_of_model(f"quark-{name}", folder, numbers)


TOOLS = {
    "bitsandbytes": of_bitsandbytes,
    "torchao": of_torchao,
    "hqq": of_hqq,
    "autoawq": of_autoawq,
    "autoround": of_autoround,
    "gptqmodel": of_gptqmodel,
    "mlx": of_mlx,
    "llmcompressor": of_llmcompressor,
    "modelopt": of_modelopt,
    "quark": of_quark,
}


if __name__ == "__main__":
    for tool in sys.argv[1:] or TOOLS:
        with torch.no_grad():
            TOOLS[tool]()
