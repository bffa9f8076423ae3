"""Writes GGUF files with gguf's own writer, from models of transformers and from tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from tests.support.ggml_blocks import SCALES, random_blocks

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = range(1, 7)


def writer(path: Path, family: str, config: Any) -> gguf.GGUFWriter:
    """A writer with the metadata of a config of transformers."""
    out = gguf.GGUFWriter(str(path), family)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        out.add_key_length(config.head_dim)
        out.add_value_length(config.head_dim)
    return out


def add_words(out: gguf.GGUFWriter, count: int) -> None:
    """A vocabulary of `count` words for models whose prompts are ids."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(count - 3))]
    out.add_tokenizer_model("llama")
    out.add_token_list(words)
    out.add_token_scores([-float(i) for i in range(count)])
    out.add_token_types([UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (count - 3)])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)


def write(out: gguf.GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_model(
    model: Any,
    path: Path,
    family: str,
    kind: str,
    more: Callable[[gguf.GGUFWriter], None],
    kinds: Mapping[str, str] | None = None,
) -> None:
    """Write a model with matrices of `kind`; the model gets the values that the file holds.

    `kinds` are those of single modules, by the last part of their names.
    """
    by_name = kinds or {}
    out = writer(path, family, model.config)
    add_words(out, model.config.vocab_size)
    more(out)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 8)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if tied and name == "lm_head.weight":
            continue
        stem, _, end = name.rpartition(".")
        theirs = names.get_name(stem)
        assert theirs is not None, name
        values = parameter.detach().numpy()
        count = heads.get(theirs.rpartition(".")[2], 0) if family == "llama" else 0
        values = paired(values, count) if count else values
        own = by_name.get(stem.rpartition(".")[2], kind)
        used = Kind[own] if values.ndim > 1 else Kind.F32
        raw = encoded(values, used)
        out.add_tensor(f"{theirs}.{end}", raw, raw_dtype=used)
        kept = gguf.quants.dequantize(raw, used).reshape(values.shape)
        kept = unpaired(kept, count) if count else kept
        parameter.data.copy_(torch.from_numpy(kept.astype(np.float32)))
    write(out)


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter puts the rows of each head."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def unpaired(rows: np.ndarray, heads: int) -> np.ndarray:
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def encoded(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes of the kind; of those that gguf cannot make itself, blocks drawn at random."""
    if kind is Kind.F32:
        return values
    if kind.name in SCALES:
        return random_blocks(kind.name, values.shape, *gguf.GGML_QUANT_SIZES[kind])
    return gguf.quants.quantize(values, kind)


def write_tokenizer(
    path: Path, kind: str, tokens: Sequence[str], types: Sequence[int], values: Mapping[str, Any]
) -> Path:
    """A file with a vocabulary and a matrix for it; `values` are further keys of the tokenizer."""
    out = gguf.GGUFWriter(str(path), "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        out.add_uint32(f"llama.{key}", 32)
    out.add_head_count(1)
    out.add_tokenizer_model(kind)
    out.add_token_list(list(tokens))
    out.add_token_types(list(types))
    for key, value in values.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            out.add_bool(name, value)
        elif isinstance(value, int):
            out.add_uint32(name, value)
        elif isinstance(value, str):
            out.add_string(name, value)
        else:
            out.add_array(name, value)
    out.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    write(out)
    return path
