"""Names of SGLang's backends, formats and devices that are not here, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TRITON = "on GPUs triton computes what it does, leave attention at auto"
_LATENTS = "on GPUs triton also attends over latents (MLA), leave attention at auto"
_CHOSEN = "the model says which tokens it chooses, leave attention at auto"
_MAPPED = "safetensors files are mapped, and read ahead, leave load_format at auto"
_SHARDS = "each rank reads its shard of an ordinary checkpoint, leave load_format at auto"
_COPIES = "replicas read a checkpoint, and its weights are replaced while serving"
_SMALL = "fp8_e4m3 and int4 are as small, choose one of them"
_SAID = "the checkpoint says what it is, leave quantization out"
_FP8 = "its experts are int4 for FP8 products, serve the FP8 checkpoint of the model"
_EXCHANGE = "deepep dispatches rows between NVIDIA GPUs of a machine, or leave it out"
_ASCEND = "its layouts are those of Ascend devices, serve another checkpoint of the model"

FOREIGN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "attention": {
            **dict.fromkeys(("fa3", "fa4", "flex_attention", "wave", "hpc_ops"), _TRITON),
            **dict.fromkeys(("minicpm_flashattn", "minicpm_flashinfer"), _TRITON),
            **dict.fromkeys(("flashmla", "trtllm_mla", "trtllm_mha"), _LATENTS),
            **dict.fromkeys(("cutlass_mla", "cutedsl_mla", "tokenspeed_mla"), _LATENTS),
            **dict.fromkeys(("dsa", "nsa", "qsa", "dsv4", "compressed"), _CHOSEN),
            "llada2_cfg_flashinfer": "blocks are filled on CPUs, leave attention at auto",
            "ascend": "a platform package brings its own, such as examples/platform_ascend",
            "intel_xpu": "with device=xpu PyTorch attends, leave attention at auto",
        },
        "device": {
            "npu": "install a platform package for it, such as examples/platform_ascend",
            "hpu": "install a platform package for it, such as examples/platform_gaudi",
            "musa": "no platform package for it is known, docs/extend says how to write one",
            "mlx": "choose device=mps, or device=cpu, which has kernels for Apple silicon",
        },
        "grammar.backend": {
            "xgrammar": "pip install 'sylvan[grammar]', or leave grammar.backend at auto",
            "outlines": "pip install 'sylvan[grammar]', or leave grammar.backend at auto",
        },
        "cache.dtype": {
            **dict.fromkeys(("mxfp8", "nvfp4", "fp4_mx_block16"), _SMALL),
            **dict.fromkeys(("bf16", "bfloat16"), "dtype sets it, leave cache.dtype at model"),
        },
        "cache.eviction": {"tlru": "lru, slru and priority keep what is used again"},
        "disagg.transfer": {
            **dict.fromkeys(("ascend", "mori", "fake"), "leave disagg.transfer at auto, or tcp"),
            "mooncake_tcp": "mooncake also sends by TCP, choose mooncake",
        },
        "load_format": {
            **dict.fromkeys(("fastsafetensors", "instanttensor", "layered"), _MAPPED),
            **dict.fromkeys(("sharded_state", "presharded", "expert_pack"), _SHARDS),
            **dict.fromkeys(("remote_instance", "flash_rl"), _COPIES),
            "npcache": "load_cache keeps packed weights, leave load_format at auto",
            "bitsandbytes": "the checkpoint says what it is, leave load_format at auto",
            "mistral": "serve the model's files in the layout of transformers",
            "remote": "give the URL as the model, leave load_format at auto",
            "runai_streamer": "give the URL as the model, leave load_format at auto",
            "private": "readers of other packages are not loaded, write safetensors",
        },
        "parallel.expert_exchange": dict.fromkeys(
            (
                *("deepep_v2", "mooncake", "nixl", "mori", "flashinfer", "flashinfer_megamoe"),
                *("megamoe", "pplx", "ascend_fuseep", "ascend_tp"),
            ),
            _EXCHANGE,
        ),
        "quantization": {
            **dict.fromkeys(("gguf", "unquant"), _SAID),
            **dict.fromkeys(("modelslim", "mxfp_w4a8"), _ASCEND),
            "humming": "the kernel follows from the format and the chip, leave quantization out",
            **dict.fromkeys(("w4afp8", "quark_int4fp8_moe"), _FP8),
        },
    }
)
"""By setting: the way out for each name."""


def instead_of(path: str, value: object) -> str:
    """The way out for a value that is not here; empty: nothing is known about it."""
    return FOREIGN.get(path, {}).get(str(value), "")
