"""How far a number format moves the predictions of the built-in model.

Held-out conversations of the kinds it was trained on are fed as they are (teacher forcing); at
each token that the assistant writes, the distribution over the next one is compared with that of
the same weights in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch

from sylvan.config.checkpoint import ASSETS
from sylvan.kernels.native.library import load
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import defer_weights
from sylvan.runtime.models.compressed import choose
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.pool.mha import KVShape
from tools.train.data.mix import evaluation_set
from tools.train.tokenizer import encode_example

SAPLING = ASSETS / "sapling"
LONGEST, PAGE, ROWS = 768, 64, 64


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids, and for each the one to predict next, or -100 where nothing is learnt."""

    ids: list[int]
    targets: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Positions at which the assistant writes."""
        return np.flatnonzero(self.targets >= 0).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Against float32, over all tokens that the assistant writes."""

    kl: float  # mean nats
    perplexity: float
    same_top: float  # share of equal best tokens


class Predictor:
    """The model in one format; predicts whole texts, one at a time."""

    def __init__(
        self,
        dtype: str,
        quantization: str | None = None,
        model: Path = SAPLING,
        *,
        int8_kv: bool = False,
    ) -> None:
        config = load_config(model)
        kind = getattr(torch, dtype)
        module = family_of(config).model(config, Build(dtype=kind, length=LONGEST))
        defer_weights(module, model, quantise=choose(config, quantization).converted)
        limits = BatchLimits(max_tokens=LONGEST, max_reqs=ROWS, max_pages_per_req=LONGEST // PAGE)
        shape = KVShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_pages=limits.max_pages_per_req + 1,
            page_size=PAGE,
        )
        pool = NativePool(shape, kind, int8=int8_kv)
        self._runner = ProgramRunner(module, limits, pool, load(), dtype=kind, threads=1)
        self._batch = ForwardBatch(limits, pool, NullAttention())
        self._batch.host.page_table[0] = np.arange(1, limits.max_pages_per_req + 1)

    def log_probs(self, text: Text) -> torch.Tensor:
        """Log probabilities at `text.rows`. Shape: float64 (rows, vocabulary)."""
        host, count = self._batch.host, len(text.ids)
        position = np.arange(count)
        host.input_ids[:count], host.positions[:count] = text.ids, position
        host.out_slots[:count] = PAGE + position
        host.kv_lens[0], host.q_starts[:2], host.req_slots[0] = count, (0, count), 0
        host.sample_rows[0] = count - 1
        self._batch.ready(count, 1, 1)
        self._runner.run(self._batch)
        chunks = [text.rows[i : i + ROWS] for i in range(0, len(text.rows), ROWS)]
        logits = torch.cat([self._runner.logits(rows).clone() for rows in chunks])
        return logits.double().log_softmax(-1)


def held_out(per_class: int, seed: int = 20_000) -> list[Text]:
    """Conversations that no training example shows."""
    tokenizer = tokenizers.Tokenizer.from_file(str(SAPLING / "tokenizer.json"))
    encoded = (encode_example(tokenizer, e) for e in evaluation_set(seed, per_class))
    return [Text(ids, np.array(targets)) for ids, targets in encoded if len(ids) <= LONGEST]


def losses(predictors: Sequence[Predictor], texts: Sequence[Text]) -> list[Loss]:
    """What each predictor loses; the first is what the others are compared with."""
    rows = [list(_compared(predictors, text)) for text in texts]
    count = sum(len(text.rows) for text in texts)
    totals = np.sum(rows, axis=0) / count
    return [Loss(kl, math.exp(nll), same) for kl, nll, same in totals.tolist()]


def _compared(predictors: Sequence[Predictor], text: Text) -> Iterator[tuple[float, float, float]]:
    """Sums of divergence, negative log likelihood and agreement over the rows of a text."""
    targets = torch.from_numpy(text.targets[text.rows])[:, None]
    exact = predictors[0].log_probs(text)
    for predictor in predictors:
        found = exact if predictor is predictors[0] else predictor.log_probs(text)
        kl = (exact.exp() * (exact - found)).sum()
        same = (exact.argmax(-1) == found.argmax(-1)).sum()
        yield float(kl), float(-found.gather(1, targets).sum()), float(same)
