"""What llama.cpp calls tensors -> what the checkpoint called them, and how they were reordered."""

from __future__ import annotations

import re

from sylvan.checkpoints.gguf.header import Header
from sylvan.protocol.errors import ConfigError

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)\Z")
DERIVED = frozenset({"rope_freqs.weight"})
"""Tensors that are part of the config."""
_TURNED = frozenset({"attn_q", "attn_k"})


def checkpoint_name(name: str, header: Header) -> str:
    """The name in the checkpoint that the file was made of.

    Raises:
        ConfigError: no tensor of these families is called so.
    """
    match = _NAME.match(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    found = _WHOLE.get(part) if layer is None else _LAYER.get(part)
    if found is None:
        raise ConfigError(f"{str(header.file)!r} has the tensor {name!r}, which is not known")
    return f"{found}.{kind}" if layer is None else f"model.layers.{layer}.{found}.{kind}"


def turned_heads(name: str, architecture: str, heads: int, kv_heads: int) -> int:
    """Heads whose rows llama.cpp put in pairs as its rotary kernel reads them; 0: none.

    It does so for `llama` only: row 2i + j of a head was row i + j * half of it.
    """
    match = _NAME.match(name)
    part = match[2] if match else ""
    if architecture != "llama" or part not in _TURNED:
        return 0
    return heads if part == "attn_q" else kv_heads
