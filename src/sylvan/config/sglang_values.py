"""SGLang's values of settings that Sylvan does not support, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TRITON = "triton computes the same on GPUs; leave attention at auto"
_LATENTS = "triton computes latent attention (MLA) on GPUs too; leave attention at auto"
_CHOSEN = "the checkpoint defines its sparse attention; leave attention at auto"
_MAPPED = "safetensors files are memory-mapped and read ahead; leave load_format at auto"
_SHARDS = "each rank reads its shard of an ordinary checkpoint; leave load_format at auto"
_COPIES = "start from a checkpoint, then call /update_weights_from_disk"
_SMALL = "choose fp8_e4m3 or int4, which are as small"
_SAID = "the format is read from the checkpoint; leave quantization out"
_FP8 = "no kernel multiplies int4 experts in FP8; serve the FP8 checkpoint of the model"
_EXCHANGE = "deepep dispatches rows between NVIDIA GPUs of a machine, or leave it out"
_ASCEND = "this layout is for Ascend devices only; serve another checkpoint of the model"

SGLANG_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "attention": {
            **dict.fromkeys(("fa3", "fa4", "flex_attention", "wave", "hpc_ops"), _TRITON),
            **dict.fromkeys(("minicpm_flashattn", "minicpm_flashinfer"), _TRITON),
            **dict.fromkeys(("flashmla", "trtllm_mla", "trtllm_mha"), _LATENTS),
            **dict.fromkeys(("cutlass_mla", "cutedsl_mla", "tokenspeed_mla"), _LATENTS),
            **dict.fromkeys(("dsa", "nsa", "qsa", "dsv4", "compressed"), _CHOSEN),
            "llada2_cfg_flashinfer": "diffusion models run on CPUs only; leave attention at auto",
            "ascend": "install a platform package, such as examples/platform_ascend",
            "intel_xpu": "PyTorch computes attention with device=xpu; leave attention at auto",
        },
        "device": {
            "npu": "install a platform package for it, such as examples/platform_ascend",
            "hpu": "install a platform package for it, such as examples/platform_gaudi",
            "musa": "no platform package for it is known; docs/extend shows how to write one",
            "mlx": "choose device=mps, or device=cpu, which has kernels for Apple silicon",
        },
        "grammar.backend": {
            "xgrammar": "pip install 'sylvan[grammar]', or leave grammar.backend at auto",
            "outlines": "pip install 'sylvan[grammar]', or leave grammar.backend at auto",
        },
        "cache.dtype": {
            **dict.fromkeys(("mxfp8", "nvfp4", "fp4_mx_block16"), _SMALL),
            **dict.fromkeys(("bf16", "bfloat16"), "leave cache.dtype at model, and set dtype"),
        },
        "cache.eviction": {"tlru": "choose lru, slru or priority"},
        "disagg.transfer": {
            **dict.fromkeys(("ascend", "mori", "fake"), "choose auto or tcp"),
            "mooncake_tcp": "choose mooncake, which also sends over TCP",
        },
        "load_format": {
            **dict.fromkeys(("fastsafetensors", "instanttensor", "layered"), _MAPPED),
            **dict.fromkeys(("sharded_state", "presharded", "expert_pack"), _SHARDS),
            **dict.fromkeys(("remote_instance", "flash_rl"), _COPIES),
            "npcache": "load_cache caches packed weights; leave load_format at auto",
            "bitsandbytes": "the format is read from the checkpoint; leave load_format at auto",
            "mistral": "serve the model's files in the layout of transformers",
            "remote": "give the URL as the model, and leave load_format at auto",
            "runai_streamer": "give the URL as the model, and leave load_format at auto",
            "private": "loaders of other packages are not used; convert the weights to safetensors",
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
            "humming": "the kernel follows from the format and the device; leave quantization out",
            **dict.fromkeys(("w4afp8", "quark_int4fp8_moe"), _FP8),
        },
    }
)
"""Setting -> value of SGLang -> what to use instead."""


def alternative_to(path: str, value: object) -> str:
    """Return what to use instead of a value that SGLang has; empty: the value is unknown."""
    return SGLANG_VALUES.get(path, {}).get(str(value), "")
