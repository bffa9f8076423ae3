"""Tiny random Hugging Face checkpoints with a tokenizer, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 199
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama(**changes: object) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SHAPE | changes)


FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": _llama,
    "llama-tied-bias": lambda: _llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=24
    ),
    "llama3-rope": lambda: _llama(rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: transformers.MistralConfig(**SHAPE | {"sliding_window": 20}),
    "qwen2": lambda: transformers.Qwen2Config(
        **SHAPE | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE | {"head_dim": 32}),
}


def make(family: str, path: Path, **saving: object) -> PreTrainedModel:
    """Write a checkpoint to `path`; returns the fp32 model that transformers made of it."""
    return write(FAMILIES[family](), len(family), path, **saving)


def write(
    config: transformers.PretrainedConfig,
    seed: int,
    path: Path,
    *,
    auto: Any = transformers.AutoModelForCausalLM,
    **saving: object,
) -> PreTrainedModel:
    """The same for any config, by any of the classes that find the model of a config."""
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1
            parameter.data += torch.randn_like(parameter) * 0.1
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # experts by token: transformers starts all at 0
            table.copy_(
                torch.rand(len(table), config.n_routed_experts).argsort()[:, : table.shape[1]]
            )
    model.eval().save_pretrained(path, **saving)
    _tokenizer().save_pretrained(path)
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCAB - 4))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def save_tokenizer(path: Path) -> None:
    """Write the tokenizer of all these checkpoints: a word for each id."""
    _tokenizer().save_pretrained(path)


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompt: list[int], new: int, *, use_cache: bool = True
) -> list[int]:
    """The answer of transformers, `new` tokens regardless of end tokens."""
    ids = torch.tensor([prompt])
    out: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=use_cache,
    )
    return out[0, len(prompt) :].tolist()
