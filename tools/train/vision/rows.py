"""Training data by number of the step: pictures with questions, and texts as for sapling."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from tools.train.data import mix
from tools.train.data.base import Example, casual, maybe_system
from tools.train.rows import padded
from tools.train.template import EMPTY_THINK, END_OF_TURN, render
from tools.train.tokenizer import encode_example
from tools.train.vision import questions
from tools.train.vision.draw import Drawn, installed_fonts
from tools.train.vision.labels import labels_of
from tools.train.vision.model import VisionConfig
from tools.train.vision.questions import Question
from tools.train.vision.tokens import load_tokenizer

_ANSWER = END_OF_TURN + "\n<|im_start|>assistant\n" + EMPTY_THINK
_MAX_TEXT = 448
_ROUND = 32

Asked = tuple[list[int], list[int]]
"""Tokens of a question, up to where the answer begins, and those of the answer."""


@dataclass
class Seen:
    """Pictures with questions about them.

    Attributes:
        before: Tokens before a picture (B), the same for all.
        pixels: uint8 (N, side, side, 3).
        asked: Groups of questions: tokens (N, questions, length), right-padded, and targets, the
            token to predict after each or -100.
        said: Numbers of the words that the patches should say (N, patches, words), if known.
    """

    before: np.ndarray
    pixels: np.ndarray
    asked: list[tuple[np.ndarray, np.ndarray]]
    said: np.ndarray | None = None


@dataclass
class Read:
    """Texts: tokens (N, length), right-padded, and targets."""

    tokens: torch.Tensor
    targets: torch.Tensor


Part = Seen | Read


def pixels_of(image: Any, side: int) -> np.ndarray:
    """A picture as the processor scales it: uint8 (side, side, 3)."""
    from PIL import Image

    return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))


class Encoder:
    """Turns questions into tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def before(self, system: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """Tokens before the picture."""
        text = render([*system, {"role": "user", "content": questions.IMAGE}])
        return np.array(self._ids(text[: text.index(questions.IMAGE)]))

    def asked(self, text: str, answer: str) -> Asked:
        """Tokens of a question, and of its answer."""
        return self._ids(text + _ANSWER), self._ids(answer + END_OF_TURN)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _length(asked: Asked) -> int:
    return len(asked[0]) + len(asked[1]) - 1


def group_of(rows: Sequence[Sequence[Asked]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of as many questions about each picture."""
    shape = len(rows), len(rows[0]), width
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, -100)
    for row, column in itertools.product(range(shape[0]), range(shape[1])):
        question, said = rows[row][column]
        end = len(question) + len(said) - 1
        tokens[row, column, :end] = question + said[:-1]
        targets[row, column, end - len(said) : end] = said
    return tokens, targets


def seen_part(encoder: Encoder, examples: Sequence[Example], config: VisionConfig) -> Seen:
    """Examples with one question each and the same system prompt."""
    rows = [
        [encoder.asked(asked["content"].removeprefix(questions.IMAGE), said["content"])]
        for one in examples
        for asked, said in [one.messages[-2:]]
    ]
    pixels = [pixels_of(one.image(), config.image_size) for one in examples if one.image]
    width = -(-max(_length(row[0]) for row in rows) // 8) * 8
    before = encoder.before(examples[0].messages[:-2])
    return Seen(before, np.stack(pixels), [group_of(rows, width)])


def read_part(tokenizer: Tokenizer, examples: Sequence[Example]) -> Read:
    """Texts, in their order."""
    rows = [encode_example(tokenizer, one) for one in examples]
    longest = max(len(ids) for ids, _ in rows)
    return Read(*padded(rows, -(-longest // _ROUND) * _ROUND))


@dataclass(frozen=True)
class Amounts:
    """Pictures of shapes and charts, pictures of words and numbers, and texts of a step."""

    shapes: int = 8
    words: int = 8
    texts: int = 6


@dataclass(frozen=True)
class Group:
    """So many questions about each picture, of up to so many tokens, if there are longer ones."""

    width: int
    count: int
    longer_than: int = 0


_GROUPS: Mapping[str, Sequence[Group]] = {
    "shapes": (Group(22, 8), Group(34, 2, longer_than=22)),
    "words": (Group(24, 4),),
}
"""Few shapes of tensors: each new one costs the matrix library a compilation."""
_TEXTS: Mapping[str, float] = {**mix.WEIGHTS, "smalltalk": 12.0, "unknown": 16.0}
"""Refusals and small talk are forgotten first: questions about pictures are like them."""
_WRITTEN = ("number", "word")
_CHANCES = {
    "shapes": {n: w for n, w in questions.WEIGHTS.items() if n not in _WRITTEN},
    "words": {n: w for n, w in questions.WEIGHTS.items() if n in _WRITTEN},
}


class Steps(Dataset[list[Part]]):
    """Parts of each step, the same whoever draws them."""

    def __init__(self, seed: int, amounts: Amounts, config: VisionConfig) -> None:
        self.seed, self.amounts, self.config = seed, amounts, config
        self.fonts = installed_fonts()
        self._tokenizer: Tokenizer | None = None

    def __getitem__(self, step: int) -> list[Part]:
        if self._tokenizer is None:  # once a process
            torch.set_num_threads(1)
            self._tokenizer = load_tokenizer()
        rng = random.Random(f"{self.seed}:vision:{step}")
        encoder = Encoder(self._tokenizer)
        made: list[Part] = [
            self._seen(rng, encoder, name) for name in _GROUPS if getattr(self.amounts, name)
        ]
        return made + self._read(rng, self._tokenizer)

    def _seen(self, rng: random.Random, encoder: Encoder, name: str) -> Seen:
        chances, pictures = _CHANCES[name], list[Drawn]()
        rows: list[list[list[Asked]]] = [[] for _ in _GROUPS[name]]
        while len(pictures) < getattr(self.amounts, name):
            [kind] = rng.choices(list(chances), list(chances.values()))
            subject = questions.subject(kind, rng, "train")
            picked = [_picked(rng, encoder, subject.questions, group) for group in _GROUPS[name]]
            if not all(picked):
                continue
            for row, found in zip(rows, picked, strict=True):
                row.append(found)
            pictures.append(subject.draw(rng, self.fonts))
        groups = [group_of(row, one.width) for row, one in zip(rows, _GROUPS[name], strict=True)]
        before = encoder.before(maybe_system(rng, 0.1))
        pixels = [pixels_of(one.image, self.config.image_size) for one in pictures]
        said = [labels_of(one, self.config)[2] for one in pictures]
        return Seen(before, np.stack(pixels), groups, np.stack(said))

    def _read(self, rng: random.Random, tokenizer: Tokenizer) -> list[Part]:
        """Texts in two parts, the short and the long ones."""
        found: list[Example] = []
        while len(found) < self.amounts.texts:
            [name] = rng.choices(list(_TEXTS), list(_TEXTS.values()))
            example = mix.draw(name, rng, "train")
            if len(encode_example(tokenizer, example)[0]) <= _MAX_TEXT:
                found.append(example)
        found.sort(key=lambda one: len(encode_example(tokenizer, one)[0]))
        half = len(found) // 2
        return [read_part(tokenizer, few) for few in (found[:half], found[half:]) if few]


def _picked(
    rng: random.Random, encoder: Encoder, found: Sequence[Question], group: Group
) -> list[Asked]:
    """Questions of a group, each at most once more than any other; none if none fits."""
    asked = [encoder.asked(casual(rng, one.text), one.answer) for one in found]
    fitting = [one for one in asked if _length(one) <= group.width]
    fitting = [one for one in fitting if _length(one) > group.longer_than] or fitting
    rng.shuffle(fitting)
    return list(itertools.islice(itertools.cycle(fitting), group.count)) if fitting else []


def as_drawn(parts: list[Part]) -> list[Part]:
    """Collate function of a loader: returns its input."""
    return parts
