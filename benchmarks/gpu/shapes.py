"""Shapes of real models, as config.json files; no checkpoint is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_QWEN3 = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Shape:
    name: str
    config: dict[str, object]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def _dense(name: str, *sizes: int, tie: bool) -> Shape:
    hidden, inner, layers, heads, kv_heads, vocab = sizes
    return Shape(
        name,
        _QWEN3
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "vocab_size": vocab,
            "tie_word_embeddings": tie,
        },
    )


def _experts(name: str, *sizes: int) -> Shape:
    hidden, inner, layers, heads, kv_heads, vocab, experts, active = sizes
    dense = _dense(name, hidden, inner, layers, heads, kv_heads, vocab, tie=False).config
    return Shape(
        name,
        dense
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": active,
            "moe_intermediate_size": inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    )


REAL = (
    _dense("0.6B", 1024, 3072, 28, 16, 8, 151936, tie=True),
    _dense("8B", 4096, 12288, 36, 32, 8, 151936, tie=False),
    _experts("30B-A3B", 2048, 768, 48, 32, 4, 151936, 128, 8),
)
TINY = (
    _dense("tiny", 64, 96, 2, 2, 1, 320, tie=True),
    _experts("tiny-experts", 64, 32, 2, 2, 1, 320, 4, 2),
)
TINY_SERVED = _dense("tiny-served", 64, 96, 2, 2, 1, 8192, tie=True)  # ids of any tokenizer fit
