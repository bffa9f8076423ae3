"""Derives BPE merges from vocabularies that store tokens only, in order of priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Pair = tuple[str, str]


def merges_by_rank(ranks: Mapping[bytes, int], spell: Callable[[bytes], str]) -> list[Pair]:
    """As tiktoken: merge the two neighbours that form the token with the lowest rank.

    So each split of a token into two others is a merge, at the token's own rank.
    """
    found: list[tuple[int, int, int, Pair]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, (spell(token[:cut]), spell(token[cut:]))))
    return [pair for *_, pair in sorted(found)]


def merges_by_score(pieces: Sequence[tuple[str, float]]) -> list[Pair]:
    """As SentencePiece: merge the two neighbours that form the piece with the highest score."""
    places = {piece: index for index, (piece, _) in enumerate(pieces)}
    found: list[tuple[float, int, int, Pair]] = []
    for piece, score in pieces:
        for cut in range(1, len(piece)):
            left, right = places.get(piece[:cut]), places.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right, (piece[:cut], piece[cut:])))
    return [pair for *_, pair in sorted(found)]
