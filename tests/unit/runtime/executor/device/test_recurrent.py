"""Models with recurrent layers on a late device answer as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from tests.parity.checkpoints import VOCAB, write
from tests.parity.rare import RARE
from tests.parity.serving import Serving
from tests.support.chosen import on_gpu
from tests.support.delayed import DelayedPlatform

LENGTHS = 5, 37, 1, 20


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    shared = rng.integers(4, VOCAB, 33).tolist()
    return [*(rng.integers(4, VOCAB, n).tolist() for n in LENGTHS), shared, [*shared, 9, 8]]


def serve(path, platform=None, **more) -> Serving:
    def build(model_dir, options):
        parts = ExecutorParts(STANDARD_WORKERS)
        return build_executor(model_dir, options, parts=parts, platform=platform)

    return Serving(path, build=build, runner="auto", **more)


@pytest.mark.skipif(on_gpu(), reason="the late device is a CPU")
@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3-next", "jamba", "mamba2"))],
)
def test_answers_are_those_of_a_cpu(family, tmp_path):
    write(RARE[family](), len(family), tmp_path)
    want = serve(tmp_path).generate(prompts(), max_new_tokens=7)

    for more in ({}, {"overlap": True, "max_batch_tokens": 24}):
        serving = serve(tmp_path, DelayedPlatform(), **more)
        assert serving.generate(prompts(), max_new_tokens=7) == want
        assert serving.generate(prompts(), max_new_tokens=7) == want, "from cached states"
        serving.close()
