"""Builds parts of a tokenizer.json for the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Json = dict[str, Any]

SPACE = "\u2581"
"""SentencePiece's space symbol."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}@| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = _CL100K.replace("@", "{1,3}")
"""Pre-tokenizer pattern of GPT-4, Llama 3 and GLM-4."""
QWEN = _CL100K.replace("@", "")
"""As `CL100K`, but each digit is a word."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An added token.

    Attributes:
        id: Token id.
        text: Its text.
        special: Whether it is a control token.
        normalized: Whether it is matched in normalised text.
    """

    id: int
    text: str
    special: bool = True
    normalized: bool = False


@cache
def char_of_byte() -> tuple[str, ...]:
    """The character for each byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return tuple(chr(b) if b in printable else chr(next(hidden)) for b in range(256))


def spelled(data: bytes) -> str:
    """Spell bytes as in byte-level vocabularies."""
    table = char_of_byte()
    return "".join(table[byte] for byte in data)


def tokenizer_json(model: Json, added: Iterable[AddedToken], **parts: Json | None) -> Json:
    """The complete file; `parts` are normalizer, pre_tokenizer, post_processor and decoder."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token.id, "content": token.text, **flags}
            | {"normalized": token.normalized, "special": token.special}
            for token in sorted(added, key=lambda token: token.id)
        ],
        **{name: parts.get(name) for name in names},
        "model": model,
    }


def bpe(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **changes: object) -> Json:
    """A BPE model that merges pairs in the order of `merges`."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
        **changes,
    }


def byte_level(
    model: Json, added: Sequence[AddedToken], patterns: Sequence[str], **parts: Any
) -> Json:
    """A byte-level tokenizer that splits text by each of `patterns` in turn."""
    splits: list[Json] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    last = level | {"use_regex": False}
    pre = {"type": "Sequence", "pretokenizers": [*splits, last]}
    parts.setdefault("post_processor", None)
    return tokenizer_json(
        model, added, pre_tokenizer=pre, decoder=level | {"use_regex": True}, **parts
    )


def around(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]] = ()) -> Json | None:
    """A post-processor that adds tokens before and after each text; None: there are none."""
    if not before and not after:
        return None

    def template(*texts: str) -> list[Json]:
        first = [_special(name) for name, _ in before]
        last = [_special(name) for name, _ in after]
        steps: list[Json] = []
        for index, text in enumerate(texts):
            steps += [*first, {"Sequence": {"id": text, "type_id": index}}, *last]
        return steps

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]}
            for name, token in [*before, *after]
        },
    }


def _special(name: str) -> Json:
    return {"SpecialToken": {"id": name, "type_id": 0}}
