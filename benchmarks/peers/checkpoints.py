"""Random-weight checkpoints of known shapes, and their GGUF forms, for all peers alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import safe_open, save_file

from sylvan.config.checkpoint import ASSETS

LONGEST = 8192
SHAPES: dict[str, dict[str, Any]] = {
    "10M": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "0.5B": json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": 64,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}


def write_checkpoint(shape: str, folder: Path) -> None:
    """A Hugging Face directory in bfloat16 with the tokenizer of the built-in model."""
    raw = SHAPES[shape] | {
        "max_position_embeddings": LONGEST,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "use_sliding_window": False,
    }
    part = folder.with_name(folder.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: make(generator) for name, make in _tensors(raw)}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(raw, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(ASSETS / "sapling" / name, part / name)
    part.rename(folder)


def _tensors(raw: dict[str, Any]) -> Iterator[tuple[str, Callable[[torch.Generator], Any]]]:
    dim, inner, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    width = raw["num_attention_heads"] * raw["head_dim"]
    kv = raw["num_key_value_heads"] * raw["head_dim"]

    def matrix(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
        return lambda g: torch.randn(shape, generator=g).mul(0.02).bfloat16()

    def ones(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
        return lambda g: torch.ones(shape).bfloat16()

    yield "model.embed_tokens.weight", matrix(vocab, dim)
    for i in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", ones(dim)
        yield layer + "post_attention_layernorm.weight", ones(dim)
        for name, rows in (("q", width), ("k", kv), ("v", kv)):
            yield f"{layer}self_attn.{name}_proj.weight", matrix(rows, dim)
            if raw["model_type"] == "qwen2":
                yield f"{layer}self_attn.{name}_proj.bias", matrix(rows)
        yield layer + "self_attn.o_proj.weight", matrix(dim, width)
        yield layer + "mlp.gate_proj.weight", matrix(inner, dim)
        yield layer + "mlp.up_proj.weight", matrix(inner, dim)
        yield layer + "mlp.down_proj.weight", matrix(dim, inner)
    yield "model.norm.weight", ones(dim)
    if not raw["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(vocab, dim)


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


def write_gguf(folder: Path, kind: str, out: Path) -> None:
    """The same weights for llama.cpp, as BF16, Q8_0 or Q4_0, without a vocabulary."""
    import gguf  # of the peer's environment
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
            array = np.ascontiguousarray(value.numpy())
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(value: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head in llama.cpp's order of rotary pairs: neighbours."""
    return value.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(value.shape)


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF[module]}.{kind}"
