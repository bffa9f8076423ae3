"""Arguments for aiter, checked by a function with its interface that computes in PyTorch."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.paged import reference
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.aiter import AiterAttention, token_index
from sylvan.runtime.platform.find import load_kinds, open_platform
from tests.parity.serving import Serving
from tests.support.on_device import OnDevice
from tests.support.paged_batch import H, K, N, batch_of
from tests.support.random_model import write_random_model


def prefill(
    q,
    k,
    v,
    cu_seqlens_q,
    kv_indptr,
    kv_page_indices,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1),
):
    """As aiter.mha_batch_prefill_func: pages are tokens, masks begin at the lower right."""
    spec = AttentionLayer(
        index=0,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        scale=softmax_scale,
        window=window_size[0] + 1 or None,
        softcap=logits_soft_cap or None,
        causal=causal,
    )
    assert window_size[1] == -1
    rows, starts = cu_seqlens_q.tolist(), kv_indptr.tolist()
    assert max(b - a for a, b in itertools.pairwise(rows)) == max_seqlen_q
    assert max(b - a for a, b in itertools.pairwise(starts)) == max_seqlen_k
    out = torch.empty_like(q)
    for r in range(len(rows) - 1):
        own, seen = slice(rows[r], rows[r + 1]), kv_page_indices[starts[r] : starts[r + 1]].long()
        out[own] = reference.attend(q[own], k[seen], v[seen], spec).unflatten(1, q.shape[1:])
    return out


LIBRARY = SimpleNamespace(mha_batch_prefill_func=prefill)


def test_index_names_the_slots_of_all_tokens_that_are_seen():
    batch = batch_of([(0, 5), (3, 1)])
    size = batch.kv.page_size
    tables = batch.host.page_tables[0]

    index = token_index(batch)

    assert index.q_starts.tolist() == [0, 5, 6]
    assert index.starts.tolist() == [0, 5, 9]
    for request, length in enumerate((5, 4)):
        own = tables[batch.host.req_slots[request]]
        wanted = [int(own[place // size]) * size + place % size for place in range(length)]
        found = index.slots[index.starts[request] : index.starts[request + 1]]
        assert found.tolist() == wanted


@pytest.mark.parametrize("changes", [{}, {"window": 3, "softcap": 5.0}], ids=["plain", "window"])
def test_result_is_that_of_the_definition(changes):
    backend, batch = AiterAttention(LIBRARY), batch_of([(0, 5), (0, 1), (0, 4)])
    q, k, v = (torch.randn(10, n, H, generator=torch.manual_seed(0)) for n in (N, K, K))
    backend.plan(batch)
    for index in range(2):
        spec = AttentionLayer(
            index=index, num_heads=N, num_kv_heads=K, head_dim=H, scale=0.3, **changes
        )
        out = backend.run(spec, q, k, v, batch)
        for own in (slice(0, 5), slice(5, 6), slice(6, 10)):
            want = reference.attend(q[own], k[own], v[own], spec).unflatten(1, (N, H))
            torch.testing.assert_close(out[own], want)


def test_the_way_of_steps_on_devices_tells_it_where_requests_lie(tmp_path):
    path = write_random_model(tmp_path, context_len=64)
    build = OnDevice(
        open_platform(load_kinds(())["cpu"]), graph=False, attention=AiterAttention(LIBRARY)
    )
    prompts = [[5, 9, 200, 31], [7] * 37]

    found = Serving(path, overlap=True, build=build).generate(prompts, max_new_tokens=6)

    assert found == Serving(path).generate(prompts, max_new_tokens=6)


def test_what_is_handed_over_has_the_names_of_the_library():
    """Where it is installed."""
    library = pytest.importorskip("aiter")
    names = ("softmax_scale", "logits_soft_cap", "causal", "window_size")

    inspect.signature(library.mha_batch_prefill_func).bind(*range(8), **dict.fromkeys(names))


def test_sinks_are_refused_in_words():
    sinks = AttentionLayer(
        index=0, num_heads=N, num_kv_heads=K, head_dim=H, scale=1.0, sinks=torch.zeros(N)
    )

    with pytest.raises(ConfigError, match="leave attention at auto"):
        AiterAttention(LIBRARY).run(sinks, *(torch.zeros(1, 1, H),) * 3, batch_of([(0, 1)]))


def test_a_missing_package_says_how_to_get_it():
    with pytest.raises(ConfigError, match="aiter is not installed; pip install amd-aiter"):
        AiterAttention()
    with pytest.raises(ConfigError, match="has no mha_batch_prefill_func; pip install amd-aiter"):
        AiterAttention(SimpleNamespace())
