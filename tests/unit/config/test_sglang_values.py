"""Every value that SGLang has by name is accepted, or refused with what to use instead."""

from __future__ import annotations

import pytest

from sylvan.config.check import check
from sylvan.config.fields import fields, get
from sylvan.config.flags import CONFIG_OPTIONS, parse_flags
from sylvan.config.load import load
from sylvan.config.parse import PLUG_INS
from sylvan.config.resolve import resolve
from sylvan.config.sglang_values import SGLANG_VALUES
from sylvan.protocol.errors import ConfigError
from tests.support.config_facts import make_facts

# the choices of SGLang 0.5.23
VALUES = {
    "attention-backend": (
        "triton torch_native flex_attention fa3 fa4 flashinfer flashmla trtllm_mla trtllm_mha "
        "cutedsl_mla tokenspeed_mla dsa nsa qsa dsv4 compressed hpc_ops minicpm_flashattn "
        "minicpm_flashinfer llada2_cfg_flashinfer aiter wave intel_amx ascend intel_xpu"
    ),
    "cuda-graph-backend-decode": "full breakable disabled",
    "device": "cuda rocm xpu npu cpu hpu musa mps mlx",
    "disaggregation-transfer-backend": "mooncake nixl ascend fake mori mooncake_tcp",
    "ep-dispatch-algorithm": "static dynamic fake lp",
    "fp4-gemm-backend": (
        "auto flashinfer_cudnn flashinfer_cutedsl flashinfer_cutlass flashinfer_trtllm marlin"
    ),
    "fp8-gemm-backend": (
        "auto deep_gemm flashinfer_trtllm flashinfer_cutlass flashinfer_deepgemm "
        "flashinfer_cutedsl cutlass triton aiter"
    ),
    "grammar-backend": "xgrammar outlines llguidance none",
    "kv-cache-dtype": "auto fp8_e5m2 fp8_e4m3 mxfp8 bf16 bfloat16 nvfp4 fp4_mx_block16",
    "linear-attn-backend": (
        "triton cutedsl flashinfer flashkda nvidia_kda ptx_kda helion intel_xpu"
    ),
    "load-format": (
        "auto pt safetensors npcache dummy sharded_state presharded gguf expert_pack bitsandbytes "
        "mistral layered flash_rl remote remote_instance fastsafetensors instanttensor private "
        "runai_streamer"
    ),
    "lora-backend": "csgmv triton triton_v2 torch_native ascend",
    "mm-attention-backend": (
        "sdpa fa3 fa4 triton_attn ascend_attn aiter_attn flashinfer_cudnn amx_attn xpu_attn"
    ),
    "moe-a2a-backend": (
        "none deepep deepep_v2 mooncake nixl mori flashinfer flashinfer_megamoe megamoe pplx "
        "ascend_fuseep ascend_tp"
    ),
    "moe-runner-backend": (
        "auto deep_gemm triton triton_kernel flashinfer_trtllm flashinfer_trtllm_routed "
        "flashinfer_cutlass flashinfer_mxfp4 flashinfer_cutedsl flashinfer_megamoe "
        "experimental_sgl_trtllm experimental_sgl_marlin cutlass aiter marlin humming "
        "lora_cutedsl lora_triton lora_marlin hpc_ops megamoe intel_xpu"
    ),
    "quantization": (
        "awq fp8 mxfp8 gptq gptq_marlin awq_marlin bitsandbytes gguf modelopt modelopt_fp8 "
        "modelopt_fp4 nvfp4_online modelopt_mixed petit_nvfp4 w8a8_int8 w8a8_fp8 moe_wna16 w4afp8 "
        "mxfp4 auto-round auto-round-int8 compressed-tensors modelslim mxfp_w4a8 quark "
        "quark_int4fp8_moe quark_mxfp4 mlx_q4 mlx_q8 unquant humming"
    ),
    "radix-eviction-policy": "lru lfu slru priority tlru",
    "sampling-backend": "flashinfer pytorch ascend intel_xpu",
    "speculative-draft-attention-backend": "flashinfer fa3 fa4 triton ascend trtllm_mha intel_xpu",
}
KNOWN = {
    "attention": ("torch", "triton", "flashinfer", "aiter", *make_facts().attention),
    "cache.eviction": ("lru", "lfu", "slru", "priority"),
    "device": ("cpu", "cuda", "rocm", "xpu", "mps"),
    "grammar.backend": ("llguidance",),
}
"""Values of settings whose values are names of modules."""


def complaint(flag, value):
    try:
        given = parse_flags([f"--{flag}", value], CONFIG_OPTIONS).given
        facts = make_facts(options=KNOWN)
        check(resolve(load(given.settings).config, facts), facts)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("flag", VALUES)
def test_every_value_is_there_or_refused_with_what_to_use_instead(flag):
    for value in VALUES[flag].split():
        text = complaint(flag, value)
        if f"{value} is not supported: " in text:
            continue
        assert "unknown" not in text
        assert "expected" not in text
        assert "not supported yet" not in text or text.endswith(")"), "(what to use instead)"


def test_what_to_use_instead_is_said_of_values_that_are_not_there():
    for path, names in SGLANG_VALUES.items():
        kinds = fields()[path]
        assert path in PLUG_INS or not {*names} & {*kinds.choices}, path
        assert all(way and not way.endswith(".") for way in names.values())


def test_a_value_of_another_server_says_what_to_use_instead():
    with pytest.raises(ConfigError) as error:
        load(parse_flags(["--load-format", "npcache"], CONFIG_OPTIONS).given.settings)

    assert str(error.value).endswith(
        "npcache is not supported: load_cache caches packed weights; leave load_format at auto"
    )


def test_the_type_of_keys_may_be_that_of_the_model():
    given = parse_flags(["--kv-cache-dtype", "auto"], CONFIG_OPTIONS).given

    assert get(load(given.settings).config, "cache.dtype") == "model"
