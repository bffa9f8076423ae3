"""Serves models that fill blocks, and says in which modes they write what was published."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.config.diffusion import DiffusionConfig
from sylvan.runtime.features.diffusion.build import diffusion_worker
from sylvan.runtime.features.diffusion.control import Diffusion
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import VOCAB
from tests.parity.published_blocks import MASK, filling, written
from tests.parity.serving import Serving

NEW = 21
LENGTHS = 40, 3, 17, 8, 1


def prompts() -> list[list[int]]:
    """Of lengths that end blocks, and others."""
    rng = np.random.default_rng(5)
    return [rng.integers(4, VOCAB - 1, n).tolist() for n in LENGTHS]


class Blocks(Serving):
    """A server of a diffusion model."""

    def __init__(
        self, folder: Path, settings: DiffusionConfig | None = None, **options: Any
    ) -> None:
        settings = settings or DiffusionConfig()
        config = load_config(folder)
        shape = config.diffusion
        assert shape is not None
        block = settings.block or shape.block
        control = Diffusion(block, shape.mask_id, config.max_position_embeddings)
        worker = partial(diffusion_worker, settings=settings)
        super().__init__(folder, capabilities=(control,), workers=(worker,), **options)


@dataclass(frozen=True)
class Filled:
    """`modes` are those whose tokens differ from the published schedule's; empty is right."""

    modes: tuple[str, ...]
    block: int
    runner: str
    kv_bytes: int


def compare_blocks(name: str, folder: Path, runner: str = "auto") -> Filled:
    """Greedy tokens in every mode, against the published schedule."""
    model = filling(name, folder)
    block = model.raw["block_size"]
    steps, confidence = block // 2 + 1, 0.2
    expected = [written(model, p, NEW, steps=steps, confidence=confidence)[0] for p in prompts()]
    assert MASK not in {token for answer in expected for token in answer}
    make = partial(Blocks, folder, DiffusionConfig(steps=steps, confidence=confidence))
    whole = make(runner=runner)
    found = {"batched": whole.generate(prompts(), max_new_tokens=NEW)}
    found["again"] = whole.generate(prompts(), max_new_tokens=NEW)
    alone = make(runner=runner)
    found["alone"] = [alone.generate([p], max_new_tokens=NEW)[0] for p in prompts()]
    chunked = make(runner=runner, chunk_tokens=16, max_batch_tokens=24)
    found["chunked"] = chunked.generate(prompts(), max_new_tokens=NEW)
    lost = make(runner=runner, preempt_every=3)
    found["preempted"] = lost.generate(prompts(), max_new_tokens=NEW)
    assert lost.scheduler.load().retractions > 0, "nothing was preempted"
    wrong = tuple(mode for mode, answers in found.items() if answers != expected)
    return Filled(wrong, block, whole.facts.runner, whole.facts.kv_bytes_per_token)
