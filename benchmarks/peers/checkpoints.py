"""Writes random-weight checkpoints of known shapes, the same for all peers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import FAMILIES, write_family

from sylvan.config.checkpoint import ASSETS

if TYPE_CHECKING:
    import torch

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
    "1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write a Hugging Face directory in bfloat16 with the tokenizer of the built-in model."""
    if shape in FAMILIES:
        write_family(shape, folder, _put_tokenizer)
        return
    import torch  # slow to import, and not needed if the checkpoint exists
    from safetensors.torch import save_file

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
    _put_tokenizer(part)
    part.rename(folder)


def _put_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(ASSETS / "sapling" / name, folder / name)


def _tensors(raw: dict[str, Any]) -> Iterator[tuple[str, Callable[[torch.Generator], Any]]]:
    dim, inner, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    width = raw["num_attention_heads"] * raw["head_dim"]
    kv = raw["num_key_value_heads"] * raw["head_dim"]

    import torch

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
