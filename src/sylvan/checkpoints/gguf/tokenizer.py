"""Converts tokenizer and chat templates of a GGUF file to checkpoint files.

Source of the pre-tokenizers: llama.cpp's table of `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sylvan.checkpoints.gguf.header import Header
from sylvan.checkpoints.vocab.build import (
    CL100K,
    GPT2,
    QWEN,
    AddedToken,
    Json,
    around,
    bpe,
    byte_level,
)
from sylvan.checkpoints.vocab.pieces import Pieces, piece_tokenizer
from sylvan.checkpoints.vocab.tiktoken import KIMI
from sylvan.protocol.errors import ConfigError

PROBLEM = "sylvan_problem"
"""Field of tokenizer_config.json: why there is no tokenizer, reported when one is needed."""

_NORMAL, _UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = range(1, 7)
_KEY = "tokenizer.ggml."
HF_JSON = "tokenizer.huggingface.json"
"""Key with a complete tokenizer.json."""


@dataclass(frozen=True, slots=True)
class _Words:
    """How text is split before pairs are merged."""

    patterns: tuple[str, ...]
    normal_form: bool = False
    whole_words: bool = False  # a word that is a token is not split
    begins: bool = False  # texts start with BOS unless the file disables it


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@|"
)
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = _CASED.replace("@", _SHORT) + r"\p{N}{1,3}" + _REST
_TEKKEN = _CASED.replace("@", "") + r"\p{N}" + _REST
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_QWEN_3_5 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_BAILING = QWEN.replace(_SHORT.removesuffix("?"), "'(?i:[sdmt]|ll|ve|re)").replace(
    r"\s*[\r\n]+", r"\s*[\r\n]"
)
_SEED = QWEN.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_NO_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
_LLAMA_3 = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
)
_PLAIN = (
    *("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum"),
    *("exaone4", "trillion", "granite-docling"),
)
_DIGITS = (
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "mellum2",
)
SPLITS: Mapping[str, _Words] = {
    **dict.fromkeys(_LLAMA_3, _Words((CL100K,), whole_words=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _Words((CL100K,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo"), _Words((QWEN,), normal_form=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"), _Words((QWEN,))),
    "qwen35": _Words((_QWEN_3_5,), normal_form=True),
    **dict.fromkeys(_PLAIN, _Words((GPT2,))),
    **dict.fromkeys(_DIGITS, _Words((r"\p{N}", GPT2))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _Words((_O200K,))),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _Words(_AYA)),
    "tekken": _Words((_TEKKEN,), whole_words=True, begins=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _Words(_DEEPSEEK_3)),
    "deepseek-coder": _Words(_DEEPSEEK_CODER),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _Words((_BAILING,))),
    "seed-coder": _Words((_SEED,)),
    "falcon": _Words(_FALCON),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _Words((_NO_PUNCTUATION,))),
    "viking": _Words((_NO_PUNCTUATION, r"\p{N}")),
    "kimi-k2": _Words((KIMI,)),
}


def text_files(header: Header) -> dict[str, Any]:
    """Name -> content of the tokenizer and template files."""
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", **_templates(header)}
    files: dict[str, Any] = {"tokenizer_config.json": config}
    there = header.metadata
    try:
        whole = _whole(header)
        vocabulary = _Vocabulary(header) if whole is None or _KEY + "tokens" in there else None
        if vocabulary is not None:
            config |= vocabulary.named()
        files["tokenizer.json"] = vocabulary.build() if whole is None and vocabulary else whole
    except ConfigError as problem:
        config[PROBLEM] = str(problem)
    return files


def _whole(header: Header) -> Json | None:
    """The tokenizer.json in a file, or None.

    Raises:
        ConfigError: It is not JSON, or not a tokenizer.
    """
    text = header.metadata.get(HF_JSON)
    if text is None:
        return None
    try:
        found = json.loads(str(text))
    except ValueError as error:
        raise ConfigError(f"{str(header.file)!r}: {HF_JSON} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise ConfigError(f"{str(header.file)!r}: {HF_JSON} is not a tokenizer")
    return found


def _templates(header: Header) -> Json:
    start = "tokenizer.chat_template"
    found = [
        {"name": key.removeprefix(start).lstrip(".") or "default", "template": value}
        for key, value in header.metadata.items()
        if key == start or key.startswith(start + ".")
        if isinstance(value, str)
    ]
    return {"chat_template": found} if found else {}


class _Vocabulary:
    """The validated lists under `tokenizer.ggml`."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.tokens = cast("list[str]", self._list("tokens", str))
        self.kinds = cast("list[int]", self._list("token_type", int)) or [_NORMAL] * len(
            self.tokens
        )
        self.scores = [float(x) for x in self._list("scores", int | float)]
        self.merges = cast("list[str]", self._list("merges", str))
        if not self.tokens:
            raise ConfigError(f"{str(header.file)!r} has no tokenizer; give one with --tokenizer")
        if len(self.kinds) != len(self.tokens):
            raise ConfigError(
                f"{str(header.file)!r}: {len(self.kinds)} types of {len(self.tokens)} tokens"
            )

    def build(self) -> Json:
        """Build the tokenizer.json.

        Raises:
            ConfigError: The kind of tokenizer is unknown; names it.
        """
        kind = self._value("model", "none")
        if kind == "gpt2":
            return self._pairs()
        if kind == "llama":
            return self._pieces()
        raise ConfigError(
            f"{str(self._header.file)!r} has a tokenizer of kind {kind!r}, which is not known "
            "(gpt2 and llama are); give one with --tokenizer DIR"
        )

    def named(self) -> dict[str, str]:
        """Texts of named tokens."""
        names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
        found = {field: self._token(f"{name}_token_id") for name, field in names.items()}
        return {field: self.tokens[token] for field, token in found.items() if token is not None}

    def _pairs(self) -> Json:
        family = str(self._header.metadata.get("general.architecture", ""))
        pre = str(self._value("pre", "qwen2" if family.startswith("qwen") else "unsaid"))
        words = SPLITS.get(pre)
        if words is None:
            raise ConfigError(
                f"{str(self._header.file)!r} splits words as {pre!r}, which is not known "
                f"({', '.join(SPLITS)} are); give its tokenizer with --tokenizer DIR"
            )
        pairs = [tuple(merge.split(" ", 1)) for merge in self.merges]
        if any(len(pair) != 2 for pair in pairs):
            raise ConfigError(f"{str(self._header.file)!r}: tokenizer.ggml.merges are not pairs")
        model = bpe(
            self._vocab(),
            cast("list[tuple[str, str]]", pairs),
            ignore_merges=words.whole_words,
        )
        return byte_level(
            model,
            self._added(),
            words.patterns,
            normalizer={"type": "NFC"} if words.normal_form else None,
            post_processor=self._around(default=words.begins),
        )

    def _pieces(self) -> Json:
        if len(self.scores) != len(self.tokens):
            raise ConfigError(
                f"{str(self._header.file)!r}: {len(self.scores)} scores of {len(self.tokens)} "
                "tokens"
            )
        unknown = self._token("unknown_token_id")
        first = self._value("add_space_prefix", True) is not False
        pieces = Pieces(
            pieces=tuple(zip(self.tokens, self.scores, strict=True)),
            unknown=self.tokens[unknown] if unknown is not None else None,
            added=tuple(self._added()),
            unused=frozenset(i for i, kind in enumerate(self.kinds) if kind == _UNUSED),
            bytes_too=_BYTE in self.kinds,
            prefix=first,
        )
        return piece_tokenizer(pieces, post_processor=self._around(default=True))

    def _vocab(self) -> dict[str, int]:
        kinds = enumerate(zip(self.tokens, self.kinds, strict=True))
        return {text: token for token, (text, kind) in kinds if kind != _UNUSED}

    def _added(self) -> list[AddedToken]:
        found = enumerate(zip(self.tokens, self.kinds, strict=True))
        return [
            AddedToken(token, text, kind != _OWN)
            for token, (text, kind) in found
            if kind in (_CONTROL, _OWN, _UNKNOWN)
        ]

    def _around(self, *, default: bool) -> Json | None:
        before, after = self._token("bos_token_id"), self._token("eos_token_id")
        starts = self._value("add_bos_token", default) is True and before is not None
        ends = self._value("add_eos_token", False) is True and after is not None
        return around(
            [(self.tokens[before], before)] if starts and before is not None else [],
            [(self.tokens[after], after)] if ends and after is not None else [],
        )

    def _token(self, key: str) -> int | None:
        value = self._value(key, None)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def _value(self, key: str, default: object) -> object:
        return self._header.metadata.get(_KEY + key, default)

    def _list(self, key: str, kind: Any) -> list[Any]:
        found = self._header.metadata.get(_KEY + key, [])
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            raise ConfigError(f"{str(self._header.file)!r}: {_KEY}{key} is not a list of that kind")
        return found
