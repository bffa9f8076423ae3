"""Values of `quantization`: formats to round to, and what a checkpoint is said to be already."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Quantization = Literal[
    "w8a8",
    "w4a8",
    "int8",
    "int4",
    "w4a16",
    "fp8",
    "fp8-block",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "nvfp4_online",
    "auto-round",
    "auto-round-int8",
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "blockwise_int8",
    "compressed-tensors",
    "fbgemm_fp8",
    "gptq",
    "gptq_marlin",
    "hqq",
    "mlx_q4",
    "mlx_q8",
    "modelopt",
    "modelopt_fp4",
    "modelopt_fp8",
    "modelopt_mixed",
    "moe_wna16",
    "petit_nvfp4",
    "quark",
    "quark_mxfp4",
    "torchao",
    "w8a8_fp8",
    "w8a8_int8",
]
ROUNDED_ROWS = ("w8a8", "int8", "w4a8", "int4")
"""Those that round what matrices multiply, too."""

_MODELOPT = frozenset({"modelopt", "modelopt_fp4"})
_AUTO_ROUND = frozenset({"auto-round", "intel/auto-round"})
STORED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "auto-round": _AUTO_ROUND,
        "auto-round-int8": _AUTO_ROUND,
        "awq": frozenset({"awq"}),
        "awq_marlin": frozenset({"awq"}),
        "bitsandbytes": frozenset({"bitsandbytes"}),
        "blockwise_int8": frozenset({"blockwise_int8"}),
        "compressed-tensors": frozenset({"compressed-tensors"}),
        "fbgemm_fp8": frozenset({"fbgemm_fp8"}),
        "gptq": frozenset({"gptq"}),
        "gptq_marlin": frozenset({"gptq"}),
        "hqq": frozenset({"hqq"}),
        "mlx_q4": frozenset({"mlx"}),
        "mlx_q8": frozenset({"mlx"}),
        "modelopt": _MODELOPT,
        "modelopt_fp4": _MODELOPT,
        "modelopt_fp8": frozenset({"modelopt"}),
        "modelopt_mixed": frozenset({"modelopt"}),
        "moe_wna16": frozenset({"awq", "gptq"}),
        "petit_nvfp4": _MODELOPT,
        "quark": frozenset({"quark"}),
        "quark_mxfp4": frozenset({"quark"}),
        "torchao": frozenset({"torchao"}),
        "w8a8_fp8": frozenset({"compressed-tensors", "fp8", "fbgemm_fp8"}),
        "w8a8_int8": frozenset({"compressed-tensors", "w8a8_int8"}),
    }
)
"""Names that say how a checkpoint is stored: its `quant_method` must be one of these.

Nothing follows from them, for config.json says it; SGLang and vLLM have such flags.
"""
BOTH: Mapping[str, str] = MappingProxyType({"fp8": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4"})
"""Formats that say the same of a checkpoint that has this `quant_method`."""
