"""Reads the vocabulary file of RWKV's World models.

A line is a token's id, its text or bytes as a Python literal, and its length in bytes. A text is
cut from left to right, each time at the longest token that it begins with. Here a regular
expression in the form of a trie does so, over the characters that stand for bytes.

Source: rwkv_tokenizer.py of BlinkDL/ChatRWKV.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from sylvan.checkpoints.vocab.build import AddedToken, Json, bpe, spelled, tokenizer_json
from sylvan.protocol.errors import ConfigError

PATTERNS = ("rwkv_vocab*.txt", "vocab.txt")
END = "<|endoftext|>"
"""The token with id 0, which no text spells."""

_LINE = re.compile(r"(\d+) (b?(?:'.*'|\".*\")) (\d+)\Z", re.DOTALL)
_BYTES = 256


def is_rwkv(data: bytes) -> bool:
    """Whether a file starts like such a vocabulary: an id, a literal, a length."""
    first = data[:200].partition(b"\n")[0].decode("utf-8", "replace")
    return _LINE.match(first.rstrip("\r")) is not None


def read_vocabulary(data: bytes) -> dict[bytes, int]:
    """Token -> id.

    Raises:
        ConfigError: a line is malformed, or a byte has no token; names it.
    """
    found: dict[bytes, int] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        if not line.strip():
            continue
        parts = _LINE.match(line.rstrip("\r"))
        token = b"" if parts is None else _literal(parts[2])
        if parts is None or not token or len(token) != int(parts[3]):
            raise ConfigError(f"line {number} is not an id, a token and its length in bytes")
        found[token] = int(parts[1])
    lacking = next((byte for byte in range(_BYTES) if bytes([byte]) not in found), None)
    if lacking is not None:
        raise ConfigError(f"the byte {lacking} has no token of its own")
    return found


def _literal(text: str) -> bytes:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return b""
    return value.encode() if isinstance(value, str) else value


def rwkv_json(vocab: Mapping[bytes, int], end: str = END) -> Json:
    """Convert to a tokenizer.json; `end` is the text of the token with id 0."""
    names = {spelled(token): number for token, number in vocab.items()}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level |= {"use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _longest(names)}, "behavior": "Isolated"}
    return tokenizer_json(
        bpe({end: 0} | names, [], ignore_merges=True),
        [AddedToken(0, end)],
        pre_tokenizer={"type": "Sequence", "pretokenizers": [level, split | {"invert": False}]},
        decoder=level,
    )


def _longest(names: Mapping[str, int]) -> str:
    """Return a pattern that matches the longest of these names."""
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(root)


def _branches(node: dict[str, Any]) -> str:
    """Return a pattern of possible continuations; empty if only the end is possible."""
    parts = [re.escape(char) + _branches(after) for char, after in node.items() if char]
    ends = "" in node
    if not parts:
        return ""
    if len(parts) == 1 and not ends:
        return parts[0]
    return f"(?:{'|'.join(parts)}){'?' if ends else ''}"
