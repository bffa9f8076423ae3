"""Encodes two texts as one sequence, according to the tokenizer's template."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from sylvan.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Piece:
    """A control token of the template, or one of the two texts (`text` 0 or 1)."""

    token: int
    text: int | None
    segment: int


class PairEncoder:
    """Encodes pairs, such as a query and a document; neither can forge a control token.

    The template is derived once from a harmless pair, so that both texts can be encoded separately.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: tuple[_Piece, ...] = ()
        self._lock = threading.Lock()

    def encode(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Token ids, and the segment of each."""
        texts = [
            self._tokenizer.encode_user(text, add_special_tokens=False) for text in (first, second)
        ]
        ids: list[int] = []
        segments: list[int] = []
        for piece in self._template():
            tokens = [piece.token] if piece.text is None else texts[piece.text]
            ids += tokens
            segments += [piece.segment] * len(tokens)
        return ids, segments

    def separates(self) -> bool:
        """Whether separator tokens stand between the two texts, or their segments differ."""
        pieces = self._template()
        places = [i for i, piece in enumerate(pieces) if piece.text is not None]
        apart = len(places) == 2 and places[1] - places[0] > 1
        return apart or len({piece.segment for piece in pieces}) > 1

    def _template(self) -> tuple[_Piece, ...]:
        with self._lock:
            if not self._pieces:
                self._pieces = tuple(self._read())
            return self._pieces

    def _read(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        for token, text, segment in self._tokenizer.encode_probe("a", "b"):
            piece = _Piece(token if text is None else 0, text, segment)
            if text is None or not pieces or pieces[-1].text != text:
                pieces.append(piece)
        return pieces
