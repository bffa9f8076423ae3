"""Labels of patches: words that each should say in sapling's embeddings, and reading them back."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.train.evaluate import ASSETS
from tools.train.vision.draw import (
    BAR,
    COLOURS,
    COLUMNS,
    HIGHEST,
    LAST,
    LOWEST,
    ORDERS,
    ROWS,
    SHAPES,
    Drawn,
    Mark,
)
from tools.train.vision.model import VisionConfig
from tools.train.vision.tokens import load_tokenizer

MARK_LABELS = ("", *SHAPES, BAR, *string.digits, *string.ascii_letters)
COLOUR_LABELS = ("", *COLOURS)
NUMBERS = ("one", "two", "three", "four", "five")
GROUPS: Mapping[str, Sequence[str]] = {
    "empty": ("\n",),
    "shapes": (*SHAPES, BAR),
    "digits": tuple(string.digits),
    "letters": tuple(string.ascii_lowercase),
    "colours": tuple(COLOURS),
    "rows": ROWS,
    "columns": COLUMNS,
    "orders": ORDERS,
    "ends": (LAST,),
    "counts": NUMBERS,
    "ranks": (HIGHEST, LOWEST),
}
"""Words that exclude each other in a patch (a bar's letter says its value as well)."""
WORDS = tuple(itertools.chain(*GROUPS.values()))
MAX_SAID = 6

Labels = tuple[np.ndarray, np.ndarray, np.ndarray]


def _patches(marks: Sequence[Mark], side: int) -> list[int]:
    """The patch that speaks for each mark: that of its centre.

    Where the centres of two characters lie in one patch, those that follow move on by one.
    """
    found: list[int] = []
    for _, together in itertools.groupby(enumerate(marks), lambda pair: _line_of(*pair)):
        line = [mark for _, mark in together]
        row = min(side - 1, max(0, int(line[0].y * side)))
        columns = [min(side - 1, max(0, int(mark.x * side))) for mark in line]
        for at in range(1, len(line)):
            columns[at] = max(columns[at], columns[at - 1] + 1)
        for at, column in enumerate(columns):
            columns[at] = min(column, side - len(line) + at)
        found += [row * side + max(0, column) for column in columns]
    return found


def _line_of(index: int, mark: Mark) -> tuple[float, int]:
    """Characters of a line stand next to each other in the list, at one height."""
    return mark.y, 0 if len(mark.name) == 1 else index + 1


def labels_of(drawn: Drawn, config: VisionConfig) -> Labels:
    """Labels of a picture's patches, as bytes.

    Returns:
        Names of the marks by half of a patch (patches, 2), where their centres are; colours
        (patches); and numbers of the words that a patch says, from one (patches, MAX_SAID).
    """
    side = config.image_size // config.patch_size
    names = np.zeros((side * side, 2), np.uint8)
    hues = np.zeros(side * side, np.uint8)
    said = np.zeros((side * side, MAX_SAID), np.uint8)
    for mark in drawn.marks:
        row = min(side - 1, max(0, int(mark.y * side)))
        half = min(2 * side - 1, max(0, int(mark.x * 2 * side)))
        patch = row * side + half // 2
        names[patch, half % 2] = MARK_LABELS.index(mark.name)
        if mark.colour:
            hues[patch] = COLOUR_LABELS.index(mark.colour)
    for mark, patch in zip(drawn.marks, _patches(drawn.marks, side), strict=True):
        said[patch] = _numbers(_words_of(mark))
    if drawn.count is not None:
        said[said[:, 0] == 0] = _numbers(("\n", *NUMBERS[drawn.count - 1 : drawn.count]))
    return names, hues, said


def _words_of(mark: Mark) -> tuple[str, ...]:
    name = mark.name.lower() if len(mark.name) == 1 else mark.name
    return (name, *((mark.colour,) if mark.colour else ()), *mark.more)


def _numbers(words: Sequence[str]) -> list[int]:
    return [*(WORDS.index(word) + 1 for word in words), *[0] * (MAX_SAID - len(words))]


def embeddings() -> Tensor:
    """Sapling's embeddings of the words, of unit scale; row 0, of nothing, is zero."""
    table = load_file(ASSETS / "model.safetensors")["model.embed_tokens.weight"].float()
    tokenizer = load_tokenizer()
    rows = [torch.zeros(table.shape[1])]
    for word in WORDS:
        text = f" {word}" if len(word) > 1 else word
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        row = table[ids].sum(0)
        rows.append(row / row.square().mean().sqrt())
    return torch.stack(rows)


def group_slices() -> dict[str, slice]:
    """Where the words of each group lie among the embeddings."""
    ends = list(itertools.accumulate(map(len, GROUPS.values()), initial=1))
    return {name: slice(*pair) for name, pair in zip(GROUPS, itertools.pairwise(ends), strict=True)}


class Reading:
    """Reads what vectors say, with the embeddings of the words."""

    def __init__(self, device: str = "cpu") -> None:
        self.table = embeddings().to(device)
        self.groups = group_slices()

    def meant(self, said: Tensor) -> Tensor:
        """The vectors that say these words: (..., words) to (..., width)."""
        return self.table[said].sum(-2)

    def scores(self, vectors: Tensor, said: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """By group: scores (K, words) of the patches that should say one of it, and which."""
        flat, words = vectors.flatten(0, -2), said.flatten(0, -2)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, part in self.groups.items():
            one = ((words >= part.start) & (words < part.stop)).nonzero()
            if len(one) and part.stop - part.start > 1:
                wanted = words[one[:, 0], one[:, 1]] - part.start
                found[name] = flat[one[:, 0]] @ self.table[part].T / 16, wanted
        return found
