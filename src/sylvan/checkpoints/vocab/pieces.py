"""Converts SentencePiece vocabularies, BPE and unigram, to tokenizer.json."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, replace
from typing import Any

from sylvan.checkpoints.vocab.build import SPACE, AddedToken, Json, bpe, tokenizer_json
from sylvan.checkpoints.vocab.merges import merges_by_score

_BYTE = re.compile(r"<0x[0-9A-F]{2}>\Z")
_SPELLED_BYTE = "<(?=0x[0-9A-F]{2}>)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """A SentencePiece vocabulary.

    Attributes:
        pieces: Text and score of each id.
        unknown: The piece for uncovered characters.
        added: Control pieces, and user-defined pieces that are never split (`special` False).
        unused: Ids that never result from text.
        bytes_too: Whether characters without a piece become byte pieces `<0xNN>`.
        prefix: Whether a space is added before each text.
        likeliest: Unigram: choose pieces by the sum of scores instead of merging pairs.
        charsmap: SentencePiece's compiled normalisation table; empty: none.
        squeeze: Whether spaces at the ends are dropped and repeated ones merged.
    """

    pieces: tuple[tuple[str, float], ...]
    unknown: str | None
    added: tuple[AddedToken, ...] = ()
    unused: frozenset[int] = frozenset()
    bytes_too: bool = False
    prefix: bool = True
    likeliest: bool = False
    charsmap: bytes = b""
    squeeze: bool = False


def piece_tokenizer(pieces: Pieces, post_processor: Json | None) -> Json:
    """Convert a vocabulary to a tokenizer.json."""
    # without a prefix such tokens may contain the space symbol, which normalisation adds to text
    late = not pieces.prefix
    return tokenizer_json(
        _likeliest(pieces) if pieces.likeliest else _pairwise(pieces),
        [replace(t, normalized=late and not t.special) for t in pieces.added],
        normalizer=_normalizer(pieces),
        pre_tokenizer=_apart(_SPELLED_BYTE) if pieces.likeliest and pieces.bytes_too else None,
        post_processor=post_processor,
        decoder=_decoder(pieces),
    )


def _pairwise(pieces: Pieces) -> Json:
    own = {token.id for token in pieces.added} | pieces.unused
    ordinary = [piece for i, piece in enumerate(pieces.pieces) if i not in own]
    ordinary = [piece for piece in ordinary if not _BYTE.match(piece[0])]
    return bpe(
        {text: i for i, (text, _) in enumerate(pieces.pieces) if i not in pieces.unused},
        merges_by_score(ordinary),
        unk_token=pieces.unknown,
        fuse_unk=True,
        byte_fallback=pieces.bytes_too,
    )


def _likeliest(pieces: Pieces) -> Json:
    texts = [text for text, _ in pieces.pieces]
    unknown = texts.index(pieces.unknown) if pieces.unknown in texts else None
    vocab = [
        [f"\0unused {i}" if i in pieces.unused else text, score]
        for i, (text, score) in enumerate(pieces.pieces)
    ]
    return {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": vocab,
        "byte_fallback": pieces.bytes_too,
    }


def _normalizer(pieces: Pieces) -> Json:
    steps: list[Json] = []
    if pieces.charsmap:
        table = base64.b64encode(pieces.charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if pieces.squeeze:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if pieces.prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(_replace(" ", SPACE))
    return {"type": "Sequence", "normalizers": steps}


def _decoder(pieces: Pieces) -> Json:
    steps = [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if pieces.prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _apart(pattern: str) -> Json:
    """Split text that spells the name of a byte piece, which would be mistaken for that byte."""
    where = {"Regex": pattern}
    return {"type": "Split", "pattern": where, "behavior": "Isolated", "invert": False}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}
