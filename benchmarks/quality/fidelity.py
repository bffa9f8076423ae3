"""Measures how far a number format changes the predictions of the built-in model.

Held-out conversations of the kinds it was trained on are fed unchanged (teacher forcing). At each
token that the assistant writes, the distribution of the next token is compared with that of the
same weights in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
import torch

from sylvan.config.checkpoint import ASSETS
from sylvan.kernels.paged.cache import SmallNumbers
from sylvan.runtime.executor import predictor as executor
from tools.train.data.mix import evaluation_set
from tools.train.tokenizer import encode_example

SAPLING = ASSETS / "sapling"
LONGEST = 768


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids, and for each the next token to predict, or -100 if it is not scored."""

    ids: list[int]
    targets: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Positions of the assistant's tokens."""
        return np.flatnonzero(self.targets >= 0).astype(np.int32)


class Predictor(executor.Predictor):
    """The built-in model in one format."""

    def __init__(
        self,
        dtype: str,
        quantization: str | None = None,
        model: Path = SAPLING,
        *,
        kv: Literal["model"] | SmallNumbers = "model",
    ) -> None:
        super().__init__(model, dtype, LONGEST, quantization, kv=kv)


def held_out(per_class: int, seed: int = 20_000) -> list[Text]:
    """Return conversations that are not in the training data."""
    tokenizer = tokenizers.Tokenizer.from_file(str(SAPLING / "tokenizer.json"))
    encoded = (encode_example(tokenizer, e) for e in evaluation_set(seed, per_class))
    return [Text(ids, np.array(targets)) for ids, targets in encoded if len(ids) <= LONGEST]


def losses(predictors: Sequence[Predictor], texts: Sequence[Text]) -> list[executor.Loss]:
    """Return the loss of each predictor; the first one is the baseline."""
    count = sum(len(text.rows) for text in texts)
    totals = np.sum([sums for text in texts for sums in _compared(predictors, text)], axis=0)
    return [executor.Loss(kl, math.exp(nll), same) for kl, nll, same in (totals / count).tolist()]


def _compared(predictors: Sequence[Predictor], text: Text) -> Iterator[np.ndarray]:
    """Return the sums of divergence, negative log likelihood and agreement over rows of a text."""
    targets = torch.from_numpy(text.targets[text.rows])[:, None]
    streams = [predictor.log_probs(text.ids, text.rows) for predictor in predictors]
    for start in range(0, len(text.rows), executor.ROWS):
        found = [next(stream) for stream in streams]
        yield executor.compared(found, targets[start : start + executor.ROWS])
