"""Training data by step number: pictures with questions, and texts as for sapling."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from torch.utils.data import Dataset

from tools.train.data import mix
from tools.train.data.base import Example
from tools.train.evaluate import ASSETS
from tools.train.rows import padded
from tools.train.tokenizer import encode_example, pieces_of
from tools.train.vision import questions
from tools.train.vision.model import IMAGE_TOKEN, VisionConfig

Part = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Tokens, targets and pictures (uint8, rows x side x side x 3).

Arrays, which need no shared memory between processes."""

_MOST_TEXT = 640
_ROUND = 32


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


def encode_seen(tokenizer: Tokenizer, example: Example, config: VisionConfig) -> Any:
    """Token ids and targets of an example with a picture."""
    tokens: list[int] = []
    learnt: list[bool] = []
    for text, learn in pieces_of(example):
        for id_ in tokenizer.encode(text, add_special_tokens=False).ids:
            times = config.num_tokens if id_ == IMAGE_TOKEN else 1
            tokens += [id_] * times
            learnt += [learn] * times
    targets = [
        token if learn else -100 for token, learn in zip(tokens[1:], learnt[1:], strict=True)
    ]
    return tokens[:-1], targets


def _wide(rows: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    longest = max(len(ids) for ids, _ in rows)
    tokens, targets = padded(rows, -(-longest // _ROUND) * _ROUND)
    return tokens.numpy(), targets.numpy()


def seen_part(tokenizer: Tokenizer, examples: list[Example], config: VisionConfig) -> Part:
    """Examples with pictures."""
    tokens, targets = _wide([encode_seen(tokenizer, one, config) for one in examples])
    pictures = [pixels_of(one.image(), config.image_size) for one in examples if one.image]
    return tokens, targets, np.stack(pictures)


def text_part(tokenizer: Tokenizer, examples: list[Example]) -> Part:
    """Texts, in their order."""
    return (*_wide([encode_example(tokenizer, one) for one in examples]), None)


def text_parts(tokenizer: Tokenizer, examples: list[Example], parts: int) -> list[Part]:
    """Texts, in parts of like length."""
    rows = [encode_example(tokenizer, one) for one in examples]
    rows = sorted((row for row in rows if len(row[0]) <= _MOST_TEXT), key=lambda row: len(row[0]))
    cuts = [len(rows) * (2**n - 1) // 2**n for n in range(parts)] + [len(rows)]
    pairs = itertools.pairwise(cuts)
    return [(*_wide(rows[low:high]), None) for low, high in pairs if high > low]


class Steps(Dataset[list[Part]]):
    """Parts of each step, the same whoever draws them, and after an interruption."""

    def __init__(self, seed: int, images: int, texts: int, config: VisionConfig) -> None:
        self.seed, self.images, self.texts, self.config = seed, images, texts, config
        self._tokenizer: Tokenizer | None = None

    def __getitem__(self, step: int) -> list[Part]:
        if self._tokenizer is None:  # once a process
            torch.set_num_threads(1)
            self._tokenizer = load_tokenizer()
        rng = random.Random(f"{self.seed}:vision:{step}")
        made: list[Part] = []
        if self.images:
            seen = [questions.drawn(rng) for _ in range(self.images)]
            made.append(seen_part(self._tokenizer, seen, self.config))
        if self.texts:
            names = rng.choices(list(mix.WEIGHTS), list(mix.WEIGHTS.values()), k=self.texts)
            read = [mix.draw(name, rng, "train") for name in names]
            made += text_parts(self._tokenizer, read, 2)
        return made


def as_drawn(parts: list[Part]) -> list[Part]:
    """Collate function of a loader: returns its input."""
    return parts
