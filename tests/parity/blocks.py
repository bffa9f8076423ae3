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
from tests.parity.published_blocks import MASK, WHOLE, filling, written, written_whole
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
        whole = int(options.get("max_batch_tokens", 512)) if shape.whole else None
        control = Diffusion(block, shape.mask_id, config.max_position_embeddings, whole)
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
    new = NEW
    if name in WHOLE:
        # the last block is whole, as published code wants it; Dream has one block
        new, block = 24, 8 if name == "llada" else 512
        steps, most = 5, 128
        settings = DiffusionConfig(steps=steps, confidence=1.0, block=block)
        given = {"steps": steps, "block": block}
        expected = [written_whole(model, p, new, **given) for p in prompts()]
    else:
        block = model.raw["block_size"]
        steps, confidence, most = block // 2 + 1, 0.2, 24
        settings = DiffusionConfig(steps=steps, confidence=confidence)
        given = {"steps": steps, "confidence": confidence}
        expected = [written(model, p, new, **given)[0] for p in prompts()]
    assert MASK not in {token for answer in expected for token in answer}
    make = partial(Blocks, folder, settings)
    whole = make(runner=runner)
    found = {"batched": whole.generate(prompts(), max_new_tokens=new)}
    found["again"] = whole.generate(prompts(), max_new_tokens=new)
    alone = make(runner=runner)
    found["alone"] = [alone.generate([p], max_new_tokens=new)[0] for p in prompts()]
    chunked = make(runner=runner, chunk_tokens=16, max_batch_tokens=most)
    found["chunked"] = chunked.generate(prompts(), max_new_tokens=new)
    lost = make(runner=runner, preempt_every=2 if name in WHOLE else 3)
    found["preempted"] = lost.generate(prompts(), max_new_tokens=new)
    assert lost.scheduler.load().retractions > 0, "nothing was preempted"
    wrong = tuple(mode for mode, answers in found.items() if answers != expected)
    return Filled(wrong, block, whole.facts.runner, whole.facts.kv_bytes_per_token)
