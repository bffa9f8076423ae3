"""The definition, in numpy."""

from __future__ import annotations

import numpy as np

from sylvan.protocol.arrays import IntArray


def longest_match(corpus: IntArray, text: IntArray, longest: int) -> tuple[int, int]:
    """Narrow the candidates by one more preceding token at a time."""
    end = text[max(0, len(text) - longest) :].tolist()[::-1]
    places = np.flatnonzero(corpus == end[0]) if end else np.empty(0, np.int64)
    matched = 0
    best = -1
    while len(places) and matched < len(end):
        best, matched = int(places[-1]), matched + 1
        if matched == len(end):
            break
        places = places[np.searchsorted(places, matched) :]
        places = places[corpus[places - matched] == end[matched]]
    return best, matched
