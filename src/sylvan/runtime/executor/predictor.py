"""Predicts the tokens of given texts without a server, to evaluate models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sylvan.kernels.native.library import load
from sylvan.kernels.paged.cache import SmallNumbers
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import defer_weights
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.formats import choose
from sylvan.runtime.models.groups import kv_groups
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.pool.mha import GroupShape, KVShape

PAGE, ROWS = 64, 64


class Predictor:
    """Runs a model as a step program and predicts whole texts, one at a time.

    Args:
        model: The checkpoint.
        dtype: Type of the rows: bfloat16 or float32.
        longest: Maximum tokens of a text.
        quantization: Format that matrices are quantised to while loading.
        threads: Threads of the kernels.
        kv: Type of keys and values, as `cache.dtype`.

    Raises:
        ConfigError: the model cannot be loaded, or is not a native decoder with attention in all
            layers.
    """

    def __init__(
        self,
        model: Path,
        dtype: str,
        longest: int,
        quantization: str | None = None,
        *,
        threads: int = 1,
        kv: Literal["model"] | SmallNumbers = "model",
    ) -> None:
        config = load_config(model)
        _check(config)
        kind = getattr(torch, dtype)
        module: Any = family_of(config).model(config, Build(dtype=kind, length=longest))
        formats = choose(config, quantization)
        defer_weights(module, model, quantise=formats.converted, blocks=formats.blocks)
        pages, latent = -(-longest // PAGE), config.latent
        limits = BatchLimits(max_tokens=longest, max_reqs=ROWS, max_pages_per_req=pages)
        shape = KVShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=1 if latent else config.num_key_value_heads,
            head_dim=latent.kept if latent else config.head_dim,
            num_pages=pages + 1,
            page_size=PAGE,
            groups=tuple(GroupShape(group.layers, pages + 1) for group in kv_groups(config)),
        )
        size = latent.latent if latent else None
        pool = NativePool(shape, kind, small=None if kv == "model" else kv, latent=size)
        self._runner: Any = ProgramRunner(module, limits, pool, load(), dtype=kind, threads=threads)
        self._batch = ForwardBatch(limits, pool, NullAttention())
        for table in self._batch.host.page_tables:
            table[0] = np.arange(1, pages + 1)

    def log_probs(self, ids: Sequence[int], rows: IntArray) -> Iterator[torch.Tensor]:
        """Yield log probabilities of the tokens after `rows`, `ROWS` rows at a time.

        Shape: float64 (rows, vocabulary).
        """
        host, count = self._batch.host, len(ids)
        position = np.arange(count)
        host.input_ids[:count], host.positions[:count] = ids, position
        for slots in host.slot_mappings:
            slots[:count] = PAGE + position
        host.kv_lens[0], host.q_starts[:2], host.req_slots[0] = count, (0, count), 0
        host.sample_rows[0] = count - 1
        self._batch.ready(count, 1, 1)
        self._runner.run(self._batch)
        for start in range(0, len(rows), ROWS):
            yield self._runner.logits(rows[start : start + ROWS]).double().log_softmax(-1)


def _check(config: ModelConfig) -> None:
    if config.path != "native" or config.states or config.head != "lm" or not config.causal:
        raise ConfigError(
            f"eval: {config.architecture} is not a native decoder with attention in all layers; "
            "other models cannot be evaluated"
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """Quality of a model over all predicted tokens, compared with the first model.

    Attributes:
        kl: Mean KL divergence of its distributions from the first model's, in nats.
        perplexity: Perplexity of the text.
        same_top: Share of positions where both models have the same most likely token.
    """

    kl: float
    perplexity: float
    same_top: float


def losses(predictors: Sequence[Predictor], texts: Sequence[Sequence[int]]) -> list[Loss]:
    """Quality of each predictor over all tokens of the texts but the first of each.

    The first predictor is the reference for the others.
    """
    totals = np.zeros((len(predictors), 3))
    count = 0
    for ids in texts:
        rows = np.arange(len(ids) - 1, dtype=np.int32)
        targets = torch.tensor(ids[1:])[:, None]
        count += len(rows)
        streams = [predictor.log_probs(ids, rows) for predictor in predictors]
        for start in range(0, len(rows), ROWS):
            found = [next(stream) for stream in streams]
            totals += compared(found, targets[start : start + ROWS])
    return [Loss(kl, math.exp(nll), same) for kl, nll, same in (totals / count).tolist()]


def compared(found: Sequence[torch.Tensor], targets: torch.Tensor) -> np.ndarray:
    """Sums over rows: divergence from the first, negative log likelihood, agreement.

    Shapes: log probabilities (T, V) of each model, `targets` (T, 1) -> (models, 3).
    """
    exact = found[0]
    sums = [
        (
            float((exact.exp() * (exact - other)).sum()),
            float(-other.gather(1, targets).sum()),
            float((exact.argmax(-1) == other.argmax(-1)).sum()),
        )
        for other in found
    ]
    return np.array(sums)
