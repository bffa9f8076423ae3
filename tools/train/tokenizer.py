"""Sapling's byte-level BPE tokenizer: each digit is a token, and any UTF-8 text round-trips."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train.data import mix
from tools.train.data.base import Example
from tools.train.template import CHAT_TEMPLATE, training_pieces

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 4096
PATTERN = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(seed: int, examples: int = 30000) -> Tokenizer:
    """Learn the merges from generated training conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        "".join(text for text, _ in pieces_of(example))
        for example in itertools.islice(mix.stream(seed), examples)
    )
    markers = SPECIAL + MARKERS
    tokenizer.train_from_iterator((_without(text, markers) for text in texts), trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in MARKERS])
    return tokenizer


def _without(text: str, markers: tuple[str, ...]) -> str:
    for marker in markers:
        text = text.replace(marker, "\n")
    return text


def pieces_of(example: Example) -> list[tuple[str, bool]]:
    """The (text, learn it) pieces of an example."""
    return example.drill or training_pieces(example.messages, example.tools)


def encode_example(tokenizer: Tokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Return the token ids of an example and, for each, the token to predict next or -100."""
    tokens: list[int] = []
    learnt: list[bool] = []
    for text, learn in pieces_of(example):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ids
        learnt += [learn] * len(ids)
    targets = [
        token if learn else -100 for token, learn in zip(tokens[1:], learnt[1:], strict=True)
    ]
    return tokens[:-1], targets


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and its companions in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for text in (*SPECIAL, *MARKERS)
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    special = {
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
