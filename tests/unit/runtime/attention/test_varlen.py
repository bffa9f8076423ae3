"""Many requests by one call of PyTorch's FlashAttention, which has no kernel for CPUs.

A function of the same interface computes request by request, and the real one is called with
tensors without data.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.paged import reference, varlen
from sylvan.kernels.paged.varlen import Packed, attend_packed, find_varlen, suits
from sylvan.runtime.attention import torch as backend
from sylvan.runtime.attention.torch import TorchAttention
from tests.support.paged_batch import H, K, N, batch_of

LAYER = AttentionLayer(index=0, num_heads=N, num_kv_heads=K, head_dim=H, scale=0.3)
REQUESTS = [(0, 5), (0, 1), (0, 4)]


class Varlen:
    """As torch.nn.attention.varlen.varlen_attn; `calls` are the numbers of requests."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(
        self, q, k, v, q_starts, k_starts, max_q, max_k, *, scale, window_size, enable_gqa,
        num_splits,
    ):  # fmt: skip
        rows, tokens = q_starts.tolist(), k_starts.tolist()
        assert (max_q, max_k) == (max(q_starts.diff()), max(k_starts.diff()))
        assert num_splits == 1
        assert enable_gqa == (q.shape[1] != k.shape[1])
        self.calls.append(len(rows) - 1)
        left, right = window_size
        assert right == 0
        layer = replace(LAYER, scale=scale, window=None if left < 0 else left + 1)
        out = torch.empty_like(q)
        for r in range(len(rows) - 1):
            own, kv = slice(rows[r], rows[r + 1]), slice(tokens[r], tokens[r + 1])
            out[own] = reference.attend(q[own], k[kv], v[kv], layer).unflatten(1, (N, H))
        return out


def heads(dtype=torch.float16):
    generator = torch.manual_seed(0)
    return tuple(torch.randn(10, n, H, generator=generator).to(dtype) for n in (N, K, K))


def attend(function, layer, q, k, v):
    made, batch = TorchAttention(function), batch_of(REQUESTS, q.dtype)
    made.plan(batch)
    return made.run(layer, q, k, v, batch)


@pytest.mark.parametrize("window", [None, 3])
def test_requests_go_together_and_give_the_same(window):
    layer, function = replace(LAYER, window=window), Varlen()

    got = attend(function, layer, *heads())

    torch.testing.assert_close(got, attend(None, layer, *heads()), rtol=2e-3, atol=2e-3)
    assert function.calls == [3]


def test_no_more_is_gathered_than_memory_should_hold(monkeypatch):
    monkeypatch.setattr(backend, "_PACKED_TOKENS", 6)
    function = Varlen()

    got = attend(function, LAYER, *heads())

    torch.testing.assert_close(got, attend(None, LAYER, *heads()), rtol=2e-3, atol=2e-3)
    assert function.calls == [2, 1]


@pytest.mark.parametrize(
    "changes",
    [{"softcap": 3.0}, {"sinks": torch.zeros(N)}, {"causal": False}, {"head_dim": 264}],
)
def test_what_it_does_not_know_goes_the_other_way(changes):
    assert suits(heads()[0], LAYER)
    assert not suits(heads()[0], replace(LAYER, **changes))
    assert not suits(heads(torch.float32)[0], LAYER)


def test_the_real_one_takes_what_it_is_given():
    function = find_varlen()
    if function is None:
        pytest.skip(f"torch {torch.__version__} has none that splits no keys")
    q, k, _ = (x.to("meta") for x in heads())
    starts = torch.zeros(4, dtype=torch.int32, device="meta")
    packed = Packed(slice(0, 10), torch.zeros(10, dtype=torch.int64, device="meta"), starts,
                    starts, 5, 5)  # fmt: skip
    pages = k[:, None], k[:, None]

    out = attend_packed(function, q, pages, packed, replace(LAYER, window=3))

    assert out.shape == (10, N, H)
    assert set(inspect.signature(function).parameters) >= varlen._NEEDED
