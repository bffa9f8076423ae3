"""Vocabularies of other tokenizer libraries, trained on a few lines, and written as checkpoints."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINES = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today?",
    "def f(x): return x + 1  # user system assistant tool think",
    "Gruesse aus Muenchen: \u00e4\u00f6\u00fc\u00df. \u4f60\u597d\uff0c\u4e16\u754c \U0001f600",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 31415}}',
] * 4


def train_pieces(**changes: Any) -> bytes:
    """Train a SentencePiece model file, with Llama 2's options unless changed."""
    import sentencepiece

    out = io.BytesIO()
    settings: dict[str, Any] = {
        "sentence_iterator": iter(LINES),
        "model_writer": out,
        "vocab_size": 420,
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": True,
        "minloglevel": 2,
        "hard_vocab_limit": False,
    }
    sentencepiece.SentencePieceTrainer.train(**settings | changes)
    return out.getvalue()


def train_ranks(pattern: str, size: int = 420) -> dict[bytes, int]:
    """Train byte-pair ranks: the most frequent pair becomes a token."""
    import regex

    ranks = {bytes([i]): i for i in range(256)}
    words = [[bytes([b]) for b in w.encode()] for w in regex.findall(pattern, "\n".join(LINES))]
    while len(ranks) < size:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[best[0] + best[1]] = len(ranks)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = [best[0] + best[1]]
                at += 1
    return ranks


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for t, rank in ranks.items())


def world_file(tokens: dict[bytes, int]) -> bytes:
    """Return a vocabulary file of RWKV: texts as Python literals, other bytes as bytes literals."""

    def literal(token: bytes) -> str:
        try:
            return repr(token.decode())
        except UnicodeDecodeError:
            return repr(token)

    lines = (f"{number} {literal(token)} {len(token)}\n" for token, number in tokens.items())
    return "".join(lines).encode()


def longest_first(tokens: dict[bytes, int], text: str) -> list[int]:
    """Return the ids of the longest token at each position."""
    data, found = text.encode(), list[int]()
    while data:
        token = max((t for t in tokens if data.startswith(t)), key=len)
        found.append(tokens[token])
        data = data[len(token) :]
    return found


def tekken_file(ranks: dict[bytes, int], pattern: str, special: int = 20) -> str:
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(ranks),
        "default_vocab_size": len(ranks) + special,
        "default_num_special_tokens": special,
        "version": "v7",
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    listed = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    return json.dumps({"config": config, "vocab": vocab, "special_tokens": listed})


def folder(path: Path, files: dict[str, bytes | str], **config: Any) -> Path:
    """A checkpoint directory with a config.json and these files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


Encode = Callable[[str], list[int]]
"""The library's ids of a text, without special tokens."""
