"""Products in parts: the sum over any division among ranks has the bits of one rank."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Unsupported
from sylvan.kernels.collective.reference import tree_sum
from sylvan.kernels.matmul.weights import quantise_int8
from sylvan.kernels.native.library import load
from tests.support.native import DTYPES, assert_close, native, random, variants

INPUTS, OUTPUTS, PARTS = 512, 70, 8


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 150])
def test_ranks_add_up_to_the_bits_of_one(variant: str, dtype: torch.dtype, rows: int):
    library = load(variant)
    x = random(rows, INPUTS, dtype=dtype, seed=1)
    weight = random(OUTPUTS, INPUTS, dtype=dtype, seed=2, scale=0.1)

    def product(first: int, count: int) -> torch.Tensor:
        """A rank's partial product, in float32."""
        columns = slice(first * INPUTS // PARTS, (first + count) * INPUTS // PARTS)
        own, w = x[:, columns].clone(), weight[:, columns].clone()
        return native(
            library, dtype, lambda _, v: ops.linear(v, w, out_f32=True, parts=count), [own]
        )

    whole = product(0, PARTS)
    for size in (2, 4, 8):
        each = PARTS // size
        ranks = torch.stack([product(rank * each, each) for rank in range(size)])
        assert torch.equal(tree_sum(ranks), whole), size
    assert_close(whole, ops.linear(x, weight, out_f32=True, parts=PARTS), dtype)
    assert_close(whole, ops.linear(x, weight, out_f32=True), dtype)


def test_what_has_no_such_parts_is_refused():
    if not isinstance(variants()[0], str):
        pytest.skip("kernels are not compiled")
    x, weight = (random(n, 96, dtype=torch.float32) for n in (3, 40))
    with pytest.raises(Unsupported, match="96 inputs in 2 parts"):
        native(load(), torch.float32, lambda _, v: ops.linear(v, weight, parts=2), [x])
    with pytest.raises(Unsupported, match="partial sums of a quantised matrix"):
        ops.linear(x, quantise_int8(weight), parts=3)
