"""Models that fill blocks on JAX write what they write on the CPU."""

from __future__ import annotations

import pytest

from sylvan.kernels.native.library import describe
from tests.parity.blocks import NEW, Blocks, prompts
from tests.parity.published_blocks import FILLING, WHOLE, filling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]
OPTIONS = {"device": "jax", "dtype": "float32", "max_samples": 64}


@pytest.mark.parametrize("name", [*FILLING, *WHOLE])
def test_blocks_are_filled_as_on_the_cpu(name, tmp_path):
    filling(name, tmp_path)
    given = prompts()[:3]
    cpu = Blocks(tmp_path, runner="auto", options={"dtype": "float32"})
    wanted = cpu.generate(given, max_new_tokens=NEW)
    cpu.close()

    serving = Blocks(
        tmp_path, runner="auto", options=OPTIONS, max_batch_tokens=64, max_running_reqs=3
    )
    try:
        assert serving.generate(given[:1], max_new_tokens=NEW) == wanted[:1]
        assert serving.generate(given, max_new_tokens=NEW) == wanted
        assert serving.facts.use()["recompiled"] == 0
    finally:
        serving.close()
