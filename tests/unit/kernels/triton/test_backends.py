"""The attention backend and sampling kernels of GPUs, run by the Triton interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope
from sylvan.kernels.paged import reference
from sylvan.kernels.sample import triton_sample
from sylvan.runtime.attention.reference import ReferenceAttention
from sylvan.runtime.attention.triton import TritonAttention
from sylvan.runtime.executor.device.sampling import TritonSampling
from sylvan.runtime.sampling.on_device import (
    DeviceLogitEdits,
    DeviceRowParams,
    Entries,
    MaskBits,
    Penalties,
    TorchSampling,
)
from sylvan.runtime.sampling.philox import uniform
from tests.support.chosen import device_name
from tests.support.paged_batch import H, K, N, batch_of
from tests.support.tensors import ints, put, random

LAYER = AttentionLayer(index=0, num_heads=N, num_kv_heads=K, head_dim=H, scale=0.3)
STEPS = {"decode": [(9, 1), (3, 1)], "prompts": [(0, 5), (6, 3)], "both": [(7, 1), (0, 4)]}
ROWS, VOCAB = 4, 70


def steps(requests, seed=1):
    """Two equal steps over equal caches."""
    found = []
    for _ in range(2):
        batch = batch_of(requests, device=device_name())
        for side in batch.kv.layer(0):
            side.copy_(random(*side.shape, seed=seed))
        found.append(batch)
    return found


@pytest.mark.parametrize("step", STEPS)
def test_attention_of_heads_is_that_of_the_reference(step):
    mine, its = steps(STEPS[step])
    rows = mine.num_tokens
    q, k, v = random(rows, N, H, seed=2), random(rows, K, H, seed=3), random(rows, K, H, seed=4)

    got = TritonAttention().run(LAYER, q, k, v, mine)

    want = ReferenceAttention().run(LAYER, q, k, v, its)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for side, other in zip(mine.kv.layer(0), its.kv.layer(0), strict=True):
        torch.testing.assert_close(side, other)


@pytest.mark.parametrize("step", STEPS)
def test_attention_of_projections_is_that_of_the_reference(step):
    mine, its = steps(STEPS[step])
    qkv = random(mine.num_tokens, (N + 2 * K) * H, seed=5)
    rope = Rope(random(16, H, seed=6))
    norms = HeadNorm(random(H, seed=7), 1e-5, 1.0), HeadNorm(random(H, seed=8), 1e-5, 1.0)

    got = TritonAttention().run_fused(LAYER, qkv, rope, norms, mine)

    heads = reference.split_heads(qkv, LAYER, its.positions_T, rope, norms)
    want = ReferenceAttention().run(LAYER, *heads, its)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_edits_of_logits_are_those_of_pytorch():
    logits = random(ROWS, VOCAB, seed=9)
    edits = DeviceLogitEdits(
        penalties=Penalties(
            counts=put(torch.arange(2 * VOCAB).view(2, VOCAB).remainder(3).float()),
            count_rows=ints([1, -1, 0, -1]),
            frequency=put(torch.tensor([0.5, 0.0, 0.1, 0.0])),
            presence=put(torch.tensor([0.2, 0.0, 0.3, 0.0])),
            repetition=put(torch.tensor([1.2, 1.0, 0.8, 1.0])),
        ),
        masks=MaskBits(ints([[0x0F0F, 7, 1], [-1, 3, 0]]), ints([-1, 0, 1, -1])),
        entries=Entries(ints([0, 3]), ints([5, 69]), put(torch.tensor([2.5, float("-inf")]))),
    )
    mine, its = logits.clone(), logits.clone()

    TritonSampling(triton_sample).edit(mine, edits)
    TorchSampling().edit(its, edits)

    torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("filtered", [False, True])
def test_draws_are_those_of_pytorch(filtered):
    logits, places = random(ROWS, VOCAB, seed=10), np.arange(ROWS, dtype=np.int64)
    seeds = places + 3
    rows = DeviceRowParams(
        greedy=put(torch.tensor([False, True, False, False])),
        temperature=put(torch.tensor([0.7, 1.0, 1.3, 0.9])),
        top_k=ints([5 if filtered else VOCAB, VOCAB, VOCAB, VOCAB]),
        top_p=put(torch.tensor([1.0, 1.0, 0.8 if filtered else 1.0, 1.0])),
        min_p=put(torch.tensor([0.0, 0.0, 0.0, 0.1 if filtered else 0.0])),
        seed=put(torch.from_numpy(seeds)),
        sample=put(torch.zeros(ROWS, dtype=torch.int64)),
        position=put(torch.from_numpy(places)),
        uniform=put(torch.from_numpy(uniform(seeds, 0 * places, places))),
    )

    got = TritonSampling(triton_sample).draw(logits.clone(), rows, filtered=filtered)

    assert got.tolist() == TorchSampling().draw(logits.clone(), rows).tolist()
