"""Converts SentencePiece, tiktoken, tekken and RWKV files to tokenizer.json when loading.

All tokenizers have the same form after that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sylvan.checkpoints.gguf.tokenizer import PROBLEM
from sylvan.checkpoints.vocab.build import AddedToken, Json
from sylvan.checkpoints.vocab.rwkv import END, PATTERNS, is_rwkv, read_vocabulary, rwkv_json
from sylvan.checkpoints.vocab.sentencepiece import read_sentencepiece
from sylvan.checkpoints.vocab.tiktoken import (
    RULES,
    is_tiktoken,
    read_ranks,
    tekken_json,
    tiktoken_json,
)
from sylvan.protocol.errors import ConfigError

_RENUMBERED = (
    *("XLMRoberta", "Camembert", "Barthez", "T5", "MT5", "Albert", "XLNet", "MBart", "NLLB", "M2M"),
    *(
        "Nllb",
        "DebertaV2",
        "BigBird",
        "Pegasus",
        "Reformer",
        "Rembert",
        "RemBert",
        "FNet",
        "Marian",
    ),
    *("Plbart", "PLBart", "Speech2Text", "SeamlessM4T", "CPM", "Ernie"),
)
"""Prefixes of tokenizer classes whose ids differ from their SentencePiece model's."""
_WITHOUT_START = ("Baichuan", "T5", "Qwen")
_CHATGLM = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
"""Tokens that the code of ChatGLM 2 and 3 adds to its model's pieces."""


def foreign_tokenizer(
    folder: Path, config: Mapping[str, Any], model: Mapping[str, Any]
) -> str | None:
    """A tokenizer.json built from other files of `folder`; None if there is no known one.

    Args:
        folder: The checkpoint.
        config: Its tokenizer_config.json.
        model: Its config.json.

    Raises:
        ConfigError: a file exists but is not usable; names it.
    """
    if PROBLEM in config:
        raise ConfigError(str(config[PROBLEM]))
    named = (folder / "tekken.json", *_rank_files(folder), folder / "tokenizer.model")
    for path in (*named, *_rwkv_files(folder, model)):
        if path.is_file():
            try:
                made = _rewritten(path, config, model)
            except ConfigError as error:
                raise ConfigError(f"{path} cannot be used: {error}") from None
            return None if made is None else json.dumps(made)
    return None


def _rewritten(path: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> Json | None:
    try:
        data = path.read_bytes()
        if path.name == "tekken.json":
            return tekken_json(json.loads(data))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if path.suffix == ".txt":
        return _world(data, config)
    if path.suffix == ".tiktoken" or is_tiktoken(data):
        return _by_rank(path, data, config, model)
    return _by_pieces(data, config)


def _world(data: bytes, config: Mapping[str, Any]) -> Json | None:
    """The tokenizer of an RWKV; None: the file is another vocabulary."""
    if not is_rwkv(data):
        return None
    end = config.get("eos_token") or END
    end = end.get("content", END) if isinstance(end, dict) else str(end)
    return rwkv_json(read_vocabulary(data), end)


def _by_pieces(data: bytes, config: Mapping[str, Any]) -> Json | None:
    kind = str(config.get("tokenizer_class") or "")
    if kind.startswith(_RENUMBERED):
        return None
    start = config.get("add_bos_token", not kind.startswith(_WITHOUT_START))
    found, eos = read_sentencepiece(data), bool(config.get("add_eos_token", False))
    if kind.startswith("ChatGLM"):
        return found.build(bos=False, eos=eos, more=_CHATGLM, before=("[gMASK]", "sop"))
    return found.build(bos=bool(start), eos=eos)


def _by_rank(path: Path, data: bytes, config: Mapping[str, Any], model: Mapping[str, Any]) -> Json:
    name = "kimi" if path.name == "tiktoken.model" else str(model.get("model_type"))
    name = "qwen" if path.name == "qwen.tiktoken" else name
    if name not in RULES:
        raise ConfigError(
            f"how it splits words is not known for model_type {name!r} ({', '.join(RULES)} are); "
            "put the model's tokenizer.json beside it, or choose another with --tokenizer DIR"
        )
    listed: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    own = [
        AddedToken(int(token), str(entry["content"]), bool(entry.get("special", True)))
        for token, entry in listed.items()
    ]
    return tiktoken_json(read_ranks(data), RULES[name], own)


def _rwkv_files(folder: Path, model: Mapping[str, Any]) -> list[Path]:
    """Files that may hold the vocabulary of an RWKV; `vocab.txt` is that of BERT, too."""
    if not str(model.get("model_type")).startswith("rwkv"):
        return []
    return [path for pattern in PATTERNS for path in sorted(folder.glob(pattern))]


def _rank_files(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.tiktoken")), folder / "tiktoken.model"]
