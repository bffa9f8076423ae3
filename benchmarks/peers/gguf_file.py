"""Writes a checkpoint as a GGUF file. Runs in llama.cpp's environment, where Sylvan cannot be
imported.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(folder: Path, kind: str, out: Path) -> None:
    """Write the same weights for llama.cpp, as BF16, Q8_0 or Q4_0, without a vocabulary."""
    import gguf
    import numpy as np

    raw = json.loads((folder / "config.json").read_text())
    arch, wanted = raw["model_type"], gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(out, arch)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_rope_dimension_count(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
            value = tensors.get_tensor(name).float()
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):
                value = _interleaved(value, raw["head_dim"])
            used = wanted if value.dim() == 2 else gguf.GGMLQuantizationType.F32
            if kind == "Q4_0" and value.dim() == 2 and name in _WHOLE:  # as other 4-bit formats do
                used = gguf.GGMLQuantizationType.Q8_0
            array = np.ascontiguousarray(value.numpy())
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(value: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head so that rotary pairs are neighbours, as llama.cpp expects."""
    return value.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(value.shape)


def _gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF[module]}.{kind}"
