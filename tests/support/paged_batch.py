"""Builds a step of a few requests with scattered pages, for attention backends."""

from __future__ import annotations

import numpy as np
import torch

from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.pool.mha import KVShape, MHAPool

PAGE, N, K, H = 4, 4, 2, 8


def batch_of(
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    width: int = H,
) -> ForwardBatch:
    """Return a batch of requests, each given as (tokens computed before, new tokens)."""
    shape = KVShape(num_layers=2, num_kv_heads=K, head_dim=width, num_pages=32, page_size=PAGE)
    pool = MHAPool(shape, dtype, torch.device(device))
    limits = BatchLimits(max_tokens=64, max_reqs=4, max_pages_per_req=8)
    batch = ForwardBatch(limits, pool, NullAttention(), torch.device(device))
    host, row, page = batch.host, 0, 1
    for r, (before, new) in enumerate(requests):
        total, slot = before + new, 3 - r
        count = -(-total // PAGE)
        host.page_table[slot, :count] = np.arange(page, page + count)[::-1]
        at = np.arange(before, total)
        host.out_slots[row : row + new] = host.page_table[slot, at // PAGE] * PAGE + at % PAGE
        host.kv_lens[r], host.req_slots[r], host.q_starts[r] = total, slot, row
        row, page = row + new, page + count
    host.q_starts[len(requests)] = row
    batch.ready(row, len(requests), 0)
    return batch
