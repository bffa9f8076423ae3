"""Write a trained model as an ordinary Hugging Face directory in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.train.model import ModelConfig
from tools.train.tokenizer import save_tokenizer, write_json


def export(
    weights: dict[str, torch.Tensor], config: ModelConfig, tokenizer: Tokenizer, folder: Path
) -> int:
    """Write config, weights and tokenizer; the number of parameters."""
    save_tokenizer(tokenizer, folder)
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": end,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "num_key_value_heads": config.num_kv_heads,
            "pad_token_id": pad,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": config.vocab_size,
        },
    )
    write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad},
    )
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in sorted(weights.items())
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def export_checkpoint(checkpoint: Path, tokenizer: Tokenizer, folder: Path) -> int:
    """Export the averaged weights of a checkpoint of the training loop."""
    state = torch.load(checkpoint, weights_only=False)
    config = ModelConfig(vocab_size=tokenizer.get_vocab_size())
    return export(state["average"], config, tokenizer, folder)
