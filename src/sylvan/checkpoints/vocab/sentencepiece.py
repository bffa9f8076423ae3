"""Reads a SentencePiece model file (`tokenizer.model`), a protocol buffer, without its library.

Source: sentencepiece_model.proto of google/sentencepiece; only fields that are used are looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from sylvan.checkpoints.vocab.build import AddedToken, Json, around
from sylvan.checkpoints.vocab.pieces import Pieces, piece_tokenizer
from sylvan.protocol.errors import ConfigError

_NORMAL, _UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3


@dataclass(slots=True)
class SentencePiece:
    """Contents of a file; `kinds` are the piece types of the proto."""

    texts: list[str] = field(default_factory=list[str])
    scores: list[float] = field(default_factory=list[float])
    kinds: list[int] = field(default_factory=list[int])
    algorithm: int = _UNIGRAM
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    prefix: bool = True
    squeeze: bool = True

    def build(
        self, *, bos: bool, eos: bool, more: Sequence[str] = (), before: Sequence[str] = ()
    ) -> Json:
        """Convert a model to a tokenizer.json; `bos` and `eos`: whether to add them to each text.

        `more` are control tokens numbered after the pieces; those `before` come before each text.

        Raises:
            ConfigError: The model type is word or char.
        """
        if self.algorithm not in (_UNIGRAM, _BPE):
            raise ConfigError("its algorithm is neither unigram nor BPE")
        kinds = list(enumerate(self.kinds))
        numbered = {text: len(self.texts) + i for i, text in enumerate(more)}
        unknown = next((self.texts[i] for i, kind in kinds if kind == _UNKNOWN), None)
        pieces = Pieces(
            pieces=tuple(zip(self.texts, self.scores, strict=True)),
            unknown=unknown,
            added=tuple(
                AddedToken(i, self.texts[i], kind != _OWN)
                for i, kind in kinds
                if kind in (_CONTROL, _OWN, _UNKNOWN)
            )
            + tuple(AddedToken(id_, text) for text, id_ in numbered.items()),
            unused=frozenset(i for i, kind in kinds if kind == _UNUSED),
            bytes_too=_BYTE in self.kinds,
            prefix=self.prefix,
            likeliest=self.algorithm == _UNIGRAM,
            charsmap=self.charsmap,
            squeeze=self.squeeze,
        )
        first = [(text, numbered[text]) for text in before]
        first += self._named(bos, self.bos_id)
        return piece_tokenizer(pieces, around(first, self._named(eos, self.eos_id)))

    def _named(self, wanted: bool, token: int) -> list[tuple[str, int]]:
        return [(self.texts[token], token)] if wanted and 0 <= token < len(self.texts) else []


def read_sentencepiece(data: bytes) -> SentencePiece:
    """Read the content of a model file.

    Raises:
        ConfigError: The file is malformed or truncated.
    """
    found = SentencePiece()
    try:
        for number, value in _fields(data):
            if number == _PIECES:
                _add_piece(found, dict(_fields(cast("bytes", value))))
            elif number == _TRAINER:
                _read_trainer(found, dict(_fields(cast("bytes", value))))
            elif number == _NORMALIZER:
                _read_normalizer(found, dict(_fields(cast("bytes", value))))
    except (IndexError, struct.error, TypeError, ValueError):
        raise ConfigError("it is not a SentencePiece model, or is cut off") from None
    if not found.texts:
        raise ConfigError("it is not a SentencePiece model: it has no pieces")
    return found


def _add_piece(found: SentencePiece, fields: dict[int, int | bytes]) -> None:
    score = fields.get(2, b"\0\0\0\0")
    found.texts.append(cast("bytes", fields.get(1, b"")).decode("utf-8"))
    found.scores.append(struct.unpack("<f", cast("bytes", score))[0])
    found.kinds.append(cast("int", fields.get(3, _NORMAL)))


def _read_trainer(found: SentencePiece, fields: dict[int, int | bytes]) -> None:
    found.algorithm = cast("int", fields.get(3, _UNIGRAM))
    found.bos_id = _signed(fields.get(41, 1))
    found.eos_id = _signed(fields.get(42, 2))


def _read_normalizer(found: SentencePiece, fields: dict[int, int | bytes]) -> None:
    found.charsmap = cast("bytes", fields.get(2, b""))
    found.prefix = bool(fields.get(3, 1))
    found.squeeze = bool(fields.get(4, 1))


def _signed(value: int | bytes) -> int:
    number = cast("int", value)
    return number - (1 << 64) if number >= 1 << 63 else number


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message; for scalar fields the last value counts."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (_EIGHT, _BYTES, _FOUR):
            raise ValueError("unknown wire type")
        size, at = _varint(data, at) if kind == _BYTES else ({_EIGHT: 8, _FOUR: 4}[kind], at)
        if at + size > len(data):
            raise ValueError("cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
