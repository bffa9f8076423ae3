"""KV bytes per token; with latent attention exactly one compressed vector per layer."""

from __future__ import annotations

import pytest
import torch

from sylvan.runtime.models.config import kv_bytes_per_token
from sylvan.runtime.models.registry import load_family
from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import KVShape, MHAPool

R1 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
WHOLE = 61 * 128 * (128 + 64 + 128) * 2
"""Keys and values of all heads of DeepSeek-R1 in bfloat16, were they kept as such."""


@pytest.mark.parametrize(
    "architecture", ["DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "AXK1ForCausalLM"]
)
def test_latent_attention_keeps_one_compressed_vector(architecture):
    config = load_family(architecture).parse(R1 | {"architectures": [architecture]})

    found = kv_bytes_per_token(config)

    assert found == 61 * (512 + 64) * 2 == 70_272
    assert WHOLE == 4_997_120
    assert 71 < WHOLE / found < 72


@pytest.mark.parametrize("latent", [False, True])
def test_pools_hold_what_is_said(latent):
    """Bytes of exported pages, which equal those of the pool."""
    sizes = {"num_layers": 3, "num_pages": 5, "page_size": 16}
    if latent:
        pool = LatentPool(KVShape(num_kv_heads=1, head_dim=576, **sizes), 512, torch.bfloat16)
        expected = 3 * 576 * 2
    else:
        pool = MHAPool(KVShape(num_kv_heads=128, head_dim=192, **sizes), torch.bfloat16)
        expected = 3 * 128 * 2 * 192 * 2

    (memory,) = pool.groups
    assert pool.layer(0)[0].untyped_storage().nbytes() == expected * 5 * 16
    assert memory.page_bytes == expected * 16
