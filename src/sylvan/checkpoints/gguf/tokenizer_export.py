"""Converts the tokenizer of a checkpoint to metadata of a GGUF file.

The complete tokenizer.json is included (`tokenizer.huggingface.json`, ggml's docs/gguf.md), which
Sylvan reads. llama.cpp needs lists of tokens and merges, and the name of the pre-tokenizer; one
that it has no name for gets its default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sylvan.checkpoints.gguf.tokenizer import HF_JSON, SPLITS
from sylvan.checkpoints.vocab.build import GPT2, SPACE
from sylvan.protocol.errors import ConfigError
from sylvan.utils.json_files import read_json

Json = dict[str, Any]
Value = int | float | str | bool | list[str] | list[int] | list[float]

_NORMAL, _UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = range(1, 7)
_KEY = "tokenizer.ggml."
_DEFAULT = "default"
_NAMED = (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))


@dataclass(frozen=True, slots=True)
class TokenizerExport:
    """Metadata by key, and a warning about llama.cpp's use of it; "": none."""

    values: Mapping[str, Value] = field(default_factory=dict[str, Value])
    problem: str = ""


def tokenizer_export(folder: Path, raw: Mapping[str, Any]) -> TokenizerExport:
    """Convert the tokenizer of the checkpoint `folder` with the config.json `raw`.

    Raises:
        ConfigError: Its files cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return TokenizerExport(problem="the model has no tokenizer.json, so none was written")
    whole, config = _read(path), _read(folder / "tokenizer_config.json")
    values: dict[str, Value] = {HF_JSON: json.dumps(whole, ensure_ascii=False)}
    if template := _template(folder, config):
        values["tokenizer.chat_template"] = template
    model = cast("Json", whole.get("model") or {})
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        problem = f"tokenizers of the type {model.get('type')!r} are for Sylvan only"
        return TokenizerExport(values, problem)
    tokens, kinds = _tokens(whole, model, int(raw["vocab_size"]))
    values[_KEY + "tokens"], values[_KEY + "token_type"] = tokens, kinds
    problem = ""
    if any(token.startswith(SPACE) for token in tokens):
        values[_KEY + "model"] = "llama"
        values[_KEY + "scores"] = [-float(number) for number in range(len(tokens))]
        kinds[:] = [_byte_kind(*pair) for pair in zip(tokens, kinds, strict=True)]
    else:
        pre = _pre(whole)
        if pre is None:
            problem = "llama.cpp has no name for the way it splits words, and uses its default"
        values[_KEY + "model"], values[_KEY + "pre"] = "gpt2", pre or _DEFAULT
        merges = model.get("merges") or []
        values[_KEY + "merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    values |= _named(whole, config, raw, tokens)
    return TokenizerExport(values, problem)


def _read(path: Path) -> Json:
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def _template(folder: Path, config: Json) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _tokens(whole: Json, model: Json, count: int) -> tuple[list[str], list[int]]:
    """Text and type of each token; missing ids become unused tokens."""
    added = [item for item in whole.get("added_tokens") or [] if isinstance(item, dict)]
    most = max([count - 1, *model["vocab"].values(), *(item["id"] for item in added)])
    tokens = [f"[PAD{number}]" for number in range(most + 1)]
    kinds = [_UNUSED] * (most + 1)
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, _NORMAL
    for item in added:
        tokens[item["id"]] = item["content"]
        kinds[item["id"]] = _CONTROL if item.get("special") else _OWN
    return tokens[:count], kinds[:count]


def _byte_kind(token: str, kind: int) -> int:
    is_byte = len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">")
    if kind == _NORMAL and is_byte:
        return _BYTE
    return _UNKNOWN if token == "<unk>" else kind


def _pre(whole: Json) -> str | None:
    """llama.cpp's name of the pre-tokenizer."""
    pre = whole.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    patterns: list[str] = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False, **rest}:
                patterns += [GPT2] if rest.get("use_regex", True) else []
            case _:
                return None
    normal = (whole.get("normalizer") or {}).get("type") == "NFC"
    whole_words = bool((whole.get("model") or {}).get("ignore_merges"))
    wanted = tuple(patterns), normal, whole_words
    for name, words in SPLITS.items():
        if (words.patterns, words.normal_form, words.whole_words) == wanted:
            return name
    return None


def _named(
    whole: Json, config: Json, raw: Mapping[str, Any], tokens: list[str]
) -> dict[str, Value]:
    """Ids of BOS and EOS, and whether texts get them."""
    places = {token: number for number, token in enumerate(tokens)}
    found: dict[str, Value] = {}
    for name, key in _NAMED:
        text = config.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        number = places.get(text) if isinstance(text, str) else None
        if number is None and name != "pad_token":
            said = raw.get(f"{key}_token_id")
            number = said[0] if isinstance(said, list) and said else said
        if isinstance(number, int) and 0 <= number < len(tokens):
            found[f"{_KEY}{key}_token_id"] = number
    if "<unk>" in places:
        found[_KEY + "unknown_token_id"] = places["<unk>"]
    around = json.dumps(whole.get("post_processor") or {})
    for key in ("bos", "eos"):
        number = found.get(f"{_KEY}{key}_token_id")
        there = isinstance(number, int) and json.dumps(tokens[number]) in around
        found[f"{_KEY}add_{key}_token"] = there
    return found
