"""The compressed pool of latent attention."""

from __future__ import annotations

import torch

from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=6, num_pages=4, page_size=2)


def test_values_are_the_first_columns_of_the_keys():
    pool = LatentPool(SHAPE, 4, torch.float32)
    keys = torch.randn(3, 1, 6)

    pool.store(1, torch.tensor([2, 3, 4]), keys, keys[..., :4])

    found, values = pool.layer(1)
    assert torch.equal(found.flatten(0, 1)[2:5], keys)
    assert torch.equal(values.flatten(0, 1)[2:5], keys[..., :4])
    assert values.data_ptr() == found.data_ptr(), "values take no memory of their own"


def test_copy_takes_the_first_tokens_only():
    pool = LatentPool(SHAPE, 4, torch.float32)
    pool.layer(0)[0][1] = 1.0

    pool.groups[0].copy_tokens([(1, 2, 1)])

    assert pool.layer(0)[0][2, :, 0, 0].tolist() == [1.0, 0.0]
