"""Scores of an index and attention to chosen tokens against their references."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.sparse import reference
from sylvan.kernels.sparse.triton_sparse import attend_slots, choose_tokens
from tests.support.tensors import DTYPES, home, put, random, tolerance

LATENT, TURNING, INDEX, PAGE = 32, 8, 24, 4
LAYER = AttentionLayer(
    index=0, num_heads=3, num_kv_heads=1, head_dim=LATENT + TURNING, v_head_dim=LATENT, scale=0.3
)


def kept(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 10 pages; the first page is of nobody."""
    rows = random(10, PAGE, 1, LATENT + TURNING + INDEX, dtype=dtype, seed=1)
    rows[0] = float("nan")
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_tokens_are_chosen(dtype):
    rows, pages = kept(dtype), put(torch.tensor([7, 2, 9, 4, 1]))
    length, top_k = 18, 5
    q, weights = random(4, 3, INDEX, seed=2), random(4, 3, seed=3)
    rows[2, 1] = rows[7, 3]  # equal scores: the earlier token is better

    found = choose_tokens(q, weights, rows, pages, length, top_k)

    given = home(q), home(weights), home(rows), home(pages)
    assert home(found).equal(reference.choose_tokens(*given, length, top_k))
    assert (home(found) <= torch.arange(length - 4, length)[:, None]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_attend_to_their_slots(dtype):
    rows = kept(dtype)
    slots = put(torch.tensor([[4, 9, 17, 30], [39, 5, 6, 21]]))
    q = random(2, LAYER.num_heads, LATENT + TURNING, dtype=dtype, seed=4)

    found = attend_slots(q, rows, slots, LAYER, LATENT)

    expected = reference.attend_slots(home(q), home(rows), home(slots), LAYER, LATENT)
    assert found.shape == (2, LAYER.num_heads, LATENT)
    bound = tolerance(dtype, 1e-5, 2e-3)
    assert torch.allclose(home(found).float(), expected.float(), atol=bound, rtol=0)
