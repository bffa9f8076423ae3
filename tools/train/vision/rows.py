"""Training data by number of the step: pictures with questions, and texts as for sapling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from torch.utils.data import Dataset

from tools.train.data import mix
from tools.train.data.base import Example, casual, maybe_system
from tools.train.evaluate import ASSETS
from tools.train.rows import padded
from tools.train.template import EMPTY_THINK, END_OF_TURN, render
from tools.train.tokenizer import encode_example
from tools.train.vision import questions
from tools.train.vision.draw import installed_fonts
from tools.train.vision.model import IMAGE_TOKEN, VisionConfig
from tools.train.vision.questions import Subject

_ANSWER = END_OF_TURN + "\n<|im_start|>assistant\n" + EMPTY_THINK
_MAX_TEXT = 448
_ROUND = 32
_SPELT = "vision_read"


@dataclass
class Part:
    """Rows of a step.

    Attributes:
        tokens: (N, length), right-padded.
        targets: Token to predict after each, or -100.
        segments: Of rows with pictures: 0 in what all questions see, then the question's number,
            -1 in padding.
        pixels: uint8 (N, side, side, 3), one picture a row.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segments: np.ndarray | None = None
    pixels: np.ndarray | None = None


def load_tokenizer() -> Tokenizer:
    """Sapling's tokenizer, and a token that stands for a patch of a picture."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(questions.IMAGE, special=True)])
    if tokenizer.token_to_id(questions.IMAGE) != IMAGE_TOKEN:
        raise ValueError("sapling's vocabulary has changed")
    return tokenizer


def pixels_of(image: Any, side: int) -> np.ndarray:
    """A picture as the processor scales it: uint8 (side, side, 3)."""
    from PIL import Image

    return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))


class Packer:
    """Packs one picture and questions about it into a row; no question sees another."""

    def __init__(self, tokenizer: Tokenizer, config: VisionConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def prefix(self, system: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Tokens up to the end of the picture."""
        text = render([*system, {"role": "user", "content": questions.IMAGE}])
        ids = self._ids(text[: text.index(questions.IMAGE)])
        return ids + [IMAGE_TOKEN] * self._config.num_tokens

    def asked(self, text: str, kind: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokens of a question, and of its answer; words that are read are spelt.

        A letter a token: letters can be read one after another, parts of words cannot.
        """
        parts = list(answer) if kind == _SPELT else [answer]
        said = [one for part in parts for one in self._ids(part)]
        return self._ids(text + _ANSWER), said + self._ids(END_OF_TURN)

    def row(
        self, prefix: Sequence[int], asked: Sequence[tuple[list[int], list[int]]], width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets and segments of as many questions as there is room for."""
        tokens, targets, segments = (np.full(width, fill) for fill in (0, -100, -1))
        at = len(prefix)
        tokens[:at], segments[:at] = prefix, 0
        for number, (question, said) in enumerate(asked, 1):
            end = at + len(question) + len(said) - 1
            if end > width:
                break
            tokens[at:end] = question + said[:-1]
            targets[end - len(said) : end] = said
            segments[at:end] = number
            at = end
        return tokens, targets, segments

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def seen_part(packer: Packer, examples: Sequence[Example], config: VisionConfig) -> Part:
    """Examples with one question each."""
    rows = []
    for example in examples:
        *system, asked, said = example.messages
        text = asked["content"].removeprefix(questions.IMAGE)
        rows.append((packer.prefix(system), packer.asked(text, example.kind, said["content"])))
    longest = max(len(prefix) + len(one[0]) + len(one[1]) for prefix, one in rows)
    packed = [packer.row(prefix, [one], longest) for prefix, one in rows]
    pictures = [pixels_of(one.image(), config.image_size) for one in examples if one.image]
    return Part(*(np.stack(column) for column in zip(*packed, strict=True)), np.stack(pictures))


def text_part(tokenizer: Tokenizer, examples: Sequence[Example]) -> Part:
    """Texts, in their order, as far as they are short."""
    rows = [encode_example(tokenizer, one) for one in examples]
    longest = max(len(ids) for ids, _ in rows)
    tokens, targets = padded(rows, -(-longest // _ROUND) * _ROUND)
    return Part(tokens.numpy(), targets.numpy())


@dataclass(frozen=True)
class Amounts:
    """Rows of a step."""

    shapes: int = 16
    words: int = 16
    texts: int = 0


_WIDTHS = {"shapes": 176, "words": 112}
"""Few: each new shape would cost the matrix library a compilation."""
_WRITTEN = ("number", "read")
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
        packer = Packer(self._tokenizer, self.config)
        made = [self._seen(rng, packer, name) for name in _WIDTHS if getattr(self.amounts, name)]
        if self.amounts.texts:
            read: list[Example] = []
            while len(read) < self.amounts.texts:
                [name] = rng.choices(list(mix.WEIGHTS), list(mix.WEIGHTS.values()))
                example = mix.draw(name, rng, "train")
                if len(encode_example(self._tokenizer, example)[0]) <= _MAX_TEXT:
                    read.append(example)
            read.sort(key=lambda one: len(encode_example(self._tokenizer, one)[0]))
            half = len(read) // 2
            made += [text_part(self._tokenizer, few) for few in (read[:half], read[half:]) if few]
        return made

    def _seen(self, rng: random.Random, packer: Packer, name: str) -> Part:
        chances, rows, pictures = _CHANCES[name], [], []
        for _ in range(getattr(self.amounts, name)):
            [kind] = rng.choices(list(chances), list(chances.values()))
            subject = questions.subject(kind, rng, "train")
            prefix = packer.prefix(maybe_system(rng, 0.1))
            asked = self._asked(rng, packer, subject)
            rows.append(packer.row(prefix, asked, _WIDTHS[name]))
            image = subject.draw(rng, self.fonts).image
            pictures.append(pixels_of(image, self.config.image_size))
        return Part(*(np.stack(column) for column in zip(*rows, strict=True)), np.stack(pictures))

    def _asked(
        self, rng: random.Random, packer: Packer, subject: Subject
    ) -> list[tuple[list[int], list[int]]]:
        """All questions of a subject, in some order."""
        found = rng.sample(list(subject.questions), len(subject.questions))
        return [packer.asked(casual(rng, one.text), one.kind, one.answer) for one in found]


def as_drawn(parts: list[Part]) -> list[Part]:
    """Collate function of a loader: returns its input."""
    return parts
