from __future__ import annotations

import numpy as np
import torch

from sylvan.runtime.pool.mha import KVShape, MHAPool

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=4, num_pages=6, page_size=4)


def filled(dtype=torch.float32) -> MHAPool:
    pool, generator = MHAPool(SHAPE, dtype), torch.Generator().manual_seed(0)
    for index in range(3):
        for tensor in pool.layer(index):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def test_store_addresses_slots():
    pool, k = MHAPool(SHAPE, torch.float32), torch.randn(2, 2, 4)

    pool.store(1, torch.tensor([9, 22], dtype=torch.int32), k, -k)

    keys, values = pool.layer(1)
    assert keys[2, 1].equal(k[0])
    assert keys[5, 2].equal(k[1])
    assert values[5, 2].equal(-k[1])
    assert keys.count_nonzero() == 16


def test_copy_takes_the_first_tokens_in_all_layers():
    pool, before = filled(), filled()

    pool.groups[0].copy_tokens([(1, 4, 3)])

    for index in range(3):
        for new, old in zip(pool.layer(index), before.layer(index), strict=True):
            assert new[4, :3].equal(old[1, :3])
            assert new[4, 3:].equal(old[4, 3:])
            assert new[[0, 1, 2, 3, 5]].equal(old[[0, 1, 2, 3, 5]])


def test_exported_layout_is_page_layer_side_token():
    pool = filled()
    (memory,) = pool.groups
    buffer = memory.host_buffer(2)

    memory.export(np.array([3, 4], np.int32), buffer).wait()

    whole = buffer.view(np.float32).reshape(2, 3, 2, 4, 2, 4)
    assert memory.page_bytes == SHAPE.bytes_per_page(torch.float32)
    assert np.array_equal(whole[1, 2, 0], pool.layer(2)[0][4].numpy())
    assert np.array_equal(whole[0, 1, 1], pool.layer(1)[1][3].numpy())
