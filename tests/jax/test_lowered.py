"""Whole steps lowered for TPUs, which needs no chip: attention, experts, recurrent layers."""

from __future__ import annotations

import jax
import pytest
from jax import export

from sylvan.kernels.native.library import describe
from sylvan.kernels.xla.pallas import PallasAttend
from tests.jax.serving import on_jax
from tests.parity.checkpoints import FAMILIES, write
from tests.parity.families import EXPERT
from tests.parity.rare import RECURRENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]
CASES = {
    "qwen3": FAMILIES["qwen3"],
    "mixtral": EXPERT["mixtral"],
    "bamba": RECURRENT["bamba"],
    "qwen3-next": RECURRENT["qwen3-next"],
}
OTHERS = [name for name in CASES if name != "qwen3"]


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.sample), *OTHERS])
def test_steps_are_lowered_for_tpus(name, tmp_path):
    write(CASES[name](), 5, tmp_path)
    serving = on_jax(tmp_path, max_batch_tokens=16, max_running_reqs=1, pages=8)
    runner = serving.executor._worker._backend._runner
    functions = runner._functions
    functions._program._attend = PallasAttend(interpret=False)
    by_kind = {bucket.decodes: bucket for bucket in functions._buckets}

    for bucket in by_kind.values():
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), functions._given(bucket, edited=False)
        )
        made = export.export(jax.jit(functions._traced(bucket)), platforms=["tpu"])(*given)
        assert "tpu_custom_call" in made.mlir_module()
        assert "callback" not in made.mlir_module()
    serving.close()
