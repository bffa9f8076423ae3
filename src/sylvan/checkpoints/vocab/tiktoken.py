"""Reads tiktoken rank files, and tekken.json, which includes its settings.

A line of a tiktoken file is a token in base64 and its rank. Pre-tokenizer and control tokens are in
the code of each model, so the models are listed here.
Sources: tokenization_qwen.py of Qwen 1, tokenizer.py of Llama 3, tokenization_kimi.py of Kimi K2,
tokenization_chatglm.py of GLM-4, tekken.py of mistral-common.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sylvan.checkpoints.vocab.build import (
    CL100K,
    QWEN,
    AddedToken,
    Json,
    around,
    bpe,
    byte_level,
    spelled,
)
from sylvan.checkpoints.vocab.merges import merges_by_rank
from sylvan.protocol.errors import ConfigError

_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+{_ENDS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*{_ENDS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
_GLM4 = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
_QWEN1 = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|extra_{i}|>" for i in range(205)),
)


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings that a rank file lacks.

    Attributes:
        pattern: Pre-tokenizer pattern.
        control: Control tokens, numbered after the ranks, unless the checkpoint lists its own.
        start: Tokens before each text.
        normal_form: Whether text is normalised to Unicode NFC.
    """

    pattern: str
    control: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    normal_form: bool = False


RULES: Mapping[str, Rules] = {
    "qwen": Rules(QWEN, _QWEN1, normal_form=True),
    "llama": Rules(CL100K, _LLAMA3, start=("<|begin_of_text|>",)),
    "chatglm": Rules(CL100K, _GLM4, start=("[gMASK]", "<sop>")),
    "kimi": Rules(KIMI),
}
"""Settings by `model_type`, or a substitute for it."""


def is_tiktoken(data: bytes) -> bool:
    """Whether a file starts like a tiktoken file: base64, a space, a rank."""
    token, space, rank = data[:200].partition(b"\n")[0].partition(b" ")
    return bool(space) and rank.strip().isdigit() and b"\0" not in token


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Token -> rank.

    Raises:
        ConfigError: A line is malformed; names it.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(f"line {number} is not a token in base64 and its rank") from None
    if not ranks:
        raise ConfigError("it holds no tokens")
    return ranks


def tiktoken_json(ranks: Mapping[bytes, int], rules: Rules, own: Sequence[AddedToken]) -> Json:
    """Convert ranks to a tokenizer.json; `own` are control tokens that the checkpoint lists."""
    first = max(ranks.values()) + 1
    control = own or [AddedToken(first + i, text) for i, text in enumerate(rules.control)]
    return _build(ranks, control, rules.pattern, rules.start, normal_form=rules.normal_form)


def tekken_json(content: Mapping[str, Any]) -> Json:
    """Convert a tekken.json to a tokenizer.json.

    Raises:
        ConfigError: An entry is missing or invalid.
    """
    try:
        config = content["config"]
        count = int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"]) - count
        entries = sorted(content["vocab"], key=lambda entry: entry["rank"])[:size]
        ranks = {base64.b64decode(e["token_bytes"]): int(e["rank"]) + count for e in entries}
        listed = cast("list[Mapping[str, Any]]", content.get("special_tokens") or [])
        names = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
        names = names or dict(enumerate(_TEKKEN))
        control = [AddedToken(i, names.get(i, f"<SPECIAL_{i}>")) for i in range(count)]
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"it is not a tekken.json: {type(error).__name__} {error}") from None
    return _build(ranks, control, pattern, (names[1],) if 1 in names else ())


_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Control tokens of old files, which do not list them."""


def _build(
    ranks: Mapping[bytes, int],
    control: Sequence[AddedToken],
    pattern: str,
    start: Sequence[str],
    *,
    normal_form: bool = False,
) -> Json:
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    vocab |= {token.text: token.id for token in control}
    model = bpe(vocab, merges_by_rank(ranks, spelled), ignore_merges=True)
    ids = {token.text: token.id for token in control}
    return byte_level(
        model,
        control,
        [pattern],
        normalizer={"type": "NFC"} if normal_form else None,
        post_processor=around([(text, ids[text]) for text in start if text in ids]),
    )
