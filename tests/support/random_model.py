"""A tiny Llama with random weights over the byte tokenizer of `scripted`; needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.scripted import write_checkpoint

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 264, 64, 112, 2, 4, 2, 16


def write_random_model(
    folder: Path,
    context_len: int = 2048,
    *,
    hidden: int = HIDDEN,
    inner: int | None = None,
    heads: int = HEADS,
    tied: bool = False,
    dtype: type[np.floating] = np.float32,
) -> Path:
    """Write the model directory, always with the same weights."""
    write_checkpoint(folder)
    inner = inner or INNER  # which tests may replace
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": np.dtype(dtype).name,
        "bos_token_id": 256,
        "eos_token_id": 258,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = _weights(hidden, inner, heads)
    if tied:
        del weights["lm_head.weight"]
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(hidden: int, inner: int, heads: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}.self_attn.q_proj.weight": matrix(heads * HEAD_DIM, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights
