"""Attention of texts over themselves, both ways."""

from __future__ import annotations

import itertools

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.paged import reference

STARTS = [0, 5, 6, 19]
HEADS, KV_HEADS, DIM = 4, 2, 8


def layer(window=None):
    return AttentionLayer(
        index=0,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=0.3,
        window=window,
        causal=False,
    )


def heads(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(STARTS[-1], n, DIM, generator=generator) for n in shapes]


def test_each_text_attends_to_all_of_itself():
    q, k, v = heads()
    out = ops.ragged_attention(q, k, v, STARTS, layer())

    for start, stop in itertools.pairwise(STARTS):
        alone = reference.attend(q[start:stop], k[start:stop], v[start:stop], layer())
        assert torch.allclose(out[start:stop], alone, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_reaches_as_far_after_as_before(window):
    q, k, v = heads()
    out = ops.ragged_attention(q, k, v, STARTS, layer(window))

    changed = v.clone()
    changed[10] += 1.0
    moved = ops.ragged_attention(q, k, changed, STARTS, layer(window)) != out
    rows = moved.any(1).nonzero().flatten().tolist()
    assert rows == [r for r in range(6, 19) if abs(r - 10) < window]


def test_a_text_does_not_depend_on_its_neighbours():
    q, k, v = heads()
    together = ops.ragged_attention(q, k, v, STARTS, layer(3))
    alone = ops.ragged_attention(q[6:], k[6:], v[6:], [0, 13], layer(3))

    assert torch.equal(together[6:], alone)
