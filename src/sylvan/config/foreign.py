"""Names of SGLang's attention backends and devices that are not here, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TRITON = "on GPUs triton computes what it does, leave attention at auto"
_LATENTS = "on GPUs triton also attends over latents (MLA), leave attention at auto"
_CHOSEN = "the model says which tokens it chooses, leave attention at auto"

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
    }
)
"""By setting: what to do in place of a name."""
