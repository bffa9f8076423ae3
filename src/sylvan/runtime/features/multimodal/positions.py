"""Rotary positions with three axes: time, height and width (M-RoPE, Qwen2-VL, arXiv:2409.12191).

A text token has the same position on all axes. The embeddings of an image form a grid that starts
where the text before it ends; the text after it continues after the grid's longest side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.media import MediaItem


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Positions of a prompt.

    Attributes:
        axes: (3, N) int32 for its N tokens.
        shift: Added to the index of later tokens.
        last: From this token on, positions are index plus `shift`.
    """

    axes: IntArray
    shift: int
    last: int


def prompt_positions(input_ids: IntArray, media: Sequence[MediaItem]) -> PromptPositions:
    """Compute positions of all tokens of a prompt.

    Args:
        input_ids: Its tokens.
        media: Its items in order; items without a grid have text positions.
    """
    axes = np.empty((3, len(input_ids)), np.int32)
    at, position, last = 0, 0, 0
    for item in media:
        places = item.placeholders(input_ids)
        if item.grid is None or not len(places):
            continue
        _, height, width = item.grid
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            first, time = int(run[0]), len(run) // (height * width)
            axes[:, at:first] = np.arange(position, position + first - at)
            position += first - at
            grid = np.indices((time, height, width), np.int32).reshape(3, -1)
            grid[0] = grid[0] * item.time_step
            at = last = first + grid.shape[1]
            axes[:, first:at] = grid + position
            position += max(int((time - 1) * item.time_step) + 1, height, width)
    axes[:, at:] = np.arange(position, position + len(input_ids) - at)
    return PromptPositions(axes, position - at, last)
