"""Every attention backend against the definition: kernels.paged.reference over gathered tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import sylvan.runtime.attention
from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.native import library
from sylvan.kernels.native.attend import NativePagedAttention
from sylvan.kernels.paged import reference
from sylvan.runtime.attention.native import NativeTensorAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.utils import plugins
from tests.support.delayed import NoWaiting

EAGER = [
    name
    for name in plugins.options(sylvan.runtime.attention)
    if "eager" in (caps := plugins.load(sylvan.runtime.attention, name).BACKEND.caps).runners
    and "cpu" in caps.devices
]
GRAPH_SAFE = [
    name
    for name in EAGER
    if plugins.load(sylvan.runtime.attention, name).BACKEND.caps.graph_capture
]
BACKENDS = [name for name in EAGER if name != "null"]
WITH_ENDS = [
    name
    for name in (*BACKENDS, "native")
    if plugins.load(sylvan.runtime.attention, name).BACKEND.caps.row_ends
]
INVARIANT = [
    name
    for name in plugins.options(sylvan.runtime.attention)
    if (caps := plugins.load(sylvan.runtime.attention, name).BACKEND.caps).batch_invariant
    and "cpu" in caps.devices
]
PAGE, NATIVE_PAGE, N, K, H = 4, 16, 6, 2, 16
SPECS = {
    "plain": {},
    "window": {"window": 5},
    "wide window": {"window": 1000},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 2, N)},
    "all": {"window": 7, "softcap": 2.0, "sinks": torch.linspace(-1, 2, N)},
    "bidirectional": {"causal": False},
}


def layer(**changes) -> AttentionLayer:
    fields = {"index": 1, "num_heads": N, "num_kv_heads": K, "head_dim": H, "scale": 0.3}
    return AttentionLayer(**fields | changes)


def parts(backend: str, kv_dtype: torch.dtype) -> tuple[Any, Any]:
    """A backend that computes on tensors, and its pool."""
    shape = KVShape(num_layers=2, num_kv_heads=K, head_dim=H, num_pages=64, page_size=PAGE)
    if backend != "native":
        return plugins.load(sylvan.runtime.attention, backend).BACKEND(), MHAPool(shape, kv_dtype)
    if library.describe().variant is None:
        pytest.skip("kernels are not compiled")
    pool = NativePool(replace(shape, page_size=NATIVE_PAGE), kv_dtype)
    return NativeTensorAttention(NativePagedAttention(library.load(), kv_dtype, pool.layers)), pool


class Scene:
    """Requests with (computed before, new) tokens on shuffled pages, as one step."""

    def __init__(
        self,
        backend: str,
        requests: list[tuple[int, int]],
        spec: AttentionLayer,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = np.random.default_rng(3)
        generator = torch.Generator().manual_seed(4)
        pages = rng.permutation(np.arange(1, 64, dtype=np.int32))
        self.backend, self.pool = parts(backend, kv_dtype)
        self.spec = spec
        limits = BatchLimits(max_tokens=128, max_reqs=8, max_pages_per_req=16)
        self.batch = ForwardBatch(limits, self.pool, self.backend)
        self.whole = []
        self._slots: list[np.ndarray] = []
        page = self.pool.page_size
        for r, (before, new) in enumerate(requests):
            total = before + new
            mine, pages = np.split(pages, [-(-total // page)])
            self.batch.host.page_table[7 - r, : len(mine)] = mine
            at = np.arange(total)
            self._slots.append(mine[at // page] * page + at % page)
            self.whole.append([torch.randn(total, n, H, generator=generator) for n in (N, K, K)])
        self.heads = self._laid_out([(0, before) for before, _ in requests])
        if any(before for before, _ in requests):
            self.run()
        self.heads = self._laid_out([(before, before + new) for before, new in requests])

    def _laid_out(self, spans: list[tuple[int, int]]) -> list[list[torch.Tensor]]:
        """The heads of tokens first .. last of each request, which the batch then computes."""
        host, row, count = self.batch.host, 0, 0
        host.out_slots[:], heads = 0, []
        for r, (first, last) in enumerate(spans):
            if first == last:
                continue
            host.out_slots[row : row + last - first] = self._slots[r][first:last]
            host.kv_lens[count], host.req_slots[count], host.q_starts[count] = last, 7 - r, row
            row, count = row + last - first, count + 1
            heads.append([x[first:last] for x in self.whole[r]])
        host.q_starts[count] = row
        self.batch.ready(row, count, 0)
        return heads

    def run(self) -> torch.Tensor:
        self.backend.plan(self.batch)
        q, k, v = (torch.cat(parts) for parts in zip(*self.heads, strict=True))
        return self.backend.run(self.spec, q, k, v, self.batch)

    def expected(self) -> torch.Tensor:
        rows = [
            reference.attend(q[-len(new[0]) :], k, v, self.spec)
            for (q, k, v), new in zip(self.whole, self.heads, strict=True)
        ]
        return torch.cat(rows).unflatten(1, (N, H))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "requests",
    [[(0, 9)], [(11, 1)], [(7, 1), (0, 5), (3, 6), (8, 8), (0, 1)], [(4, 4), (15, 1)]],
    ids=["prompt", "decode", "mixed", "page borders"],
)
def test_backend_equals_definition(backend, spec, requests):
    scene = Scene(backend, requests, layer(**SPECS[spec]))

    torch.testing.assert_close(scene.run(), scene.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", WITH_ENDS)
@pytest.mark.parametrize("spec", [name for name in SPECS if name != "bidirectional"])
def test_rows_see_tokens_up_to_their_ends(backend, spec):
    scene = Scene(backend, [(3, 9), (0, 1), (1, 6)], layer(**SPECS[spec]))
    ends = [np.arange(before + 1, before + new + 1) for before, new in ((3, 9), (0, 1), (1, 6))]
    ends[0][2:7] = 10  # tokens 5 .. 9 see each other
    ends[2][:] = 0  # plain ones need none
    scene.batch.row_ends = np.concatenate(ends).astype(np.int32)

    rows = [
        reference.attend(q[-len(end) :], k, v, scene.spec, ends_T=torch.from_numpy(end))
        for (q, k, v), end in zip(scene.whole, ends, strict=True)
    ]
    expected = torch.cat(rows).unflatten(1, (N, H))
    torch.testing.assert_close(scene.run(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected[2], scene.expected()[2], atol=1e-3)
    scene.spec = replace(scene.spec, row_ends=False)
    torch.testing.assert_close(scene.run(), scene.expected(), rtol=1e-5, atol=1e-5)
    scene.spec, scene.batch.row_ends = replace(scene.spec, row_ends=True), None
    torch.testing.assert_close(scene.run(), scene.expected(), rtol=1e-5, atol=1e-5)


def test_ends_are_masks():
    q, k, v = (torch.randn(6, heads, H) for heads in (N, K, K))
    ends = torch.tensor([1, 4, 4, 4, 5, 6])
    found = reference.attend(q, k, v, layer(), ends_T=ends)
    seen = torch.arange(6) < torch.maximum(ends, torch.arange(1, 7))[:, None]
    keys, values = (x.repeat_interleave(N // K, 1).transpose(0, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys, values, attn_mask=seen, scale=0.3
    )
    torch.testing.assert_close(found, expected.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_keys_are_stored(backend):
    scene = Scene(backend, [(3, 2)], layer())
    scene.run()

    keys, values = scene.pool.layer(1)
    slots = scene.batch.slots_of(1).long()
    assert keys.flatten(0, 1)[slots].equal(scene.heads[0][1])
    assert values.flatten(0, 1)[slots].equal(scene.heads[0][2])
    assert not scene.pool.layer(0)[0].any(), "another layer was written"


@pytest.mark.parametrize("backend", INVARIANT)
@pytest.mark.parametrize("spec", SPECS)
def test_batch_invariant_backends_give_the_same_bits_in_any_company(backend, spec):
    requests = [(9, 4), (0, 7), (5, 3)]
    together = Scene(backend, requests, layer(**SPECS[spec])).run()

    alone = Scene(backend, requests, layer(**SPECS[spec]))
    alone.batch.ready(4, 1, 0)
    alone.heads = alone.heads[:1]
    decoding = Scene(backend, [(12, 1)], layer(**SPECS[spec]))

    assert alone.run().equal(together[:4])
    if spec != "bidirectional":  # where earlier tokens see later ones
        assert decoding.run().equal(together[3:4])


def test_what_serves_deterministically_promises_batch_invariance():
    assert "native" in INVARIANT


@pytest.mark.parametrize("backend", EAGER)
def test_backend_declares_devices_and_keeps_shapes(backend):
    scene = Scene(backend, [(0, 3), (2, 1)], layer())

    assert "cpu" in scene.backend.caps.devices
    assert scene.run().shape == (4, N, H)


@pytest.mark.parametrize("backend", GRAPH_SAFE)
def test_graph_safe_backends_read_nothing_on_the_host_and_ignore_padding(backend):
    scene = Scene(backend, [(5, 1), (2, 1), (9, 1)], layer())
    scene.batch.ready(5, 5, 0)
    padding = torch.full((2, 1, H), torch.nan)
    q, k, v = (torch.cat(parts) for parts in zip(*scene.heads, strict=True))
    q, k, v = (torch.cat((x, padding.expand(-1, x.shape[1], -1))) for x in (q, k, v))
    scene.batch.kv_lens_R[3:] = 0  # rows of no request; their slots are those of page 0
    scene.batch.q_starts_R[3:] = torch.tensor([3, 4, 5])

    with NoWaiting():
        scene.backend.plan(scene.batch)
        out = scene.backend.run(scene.spec, q, k, v, scene.batch)

    if backend != "null":
        torch.testing.assert_close(out[:3], scene.expected(), rtol=1e-5, atol=1e-5)
    assert not out[3:].any()


@pytest.mark.parametrize(
    ("kind", "near"), [("fp8_e4m3", 0.1), ("fp8_e5m2", 0.2)], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_of_8_bits_are_near(backend, kind, near):
    caps = plugins.load(sylvan.runtime.attention, backend).BACKEND.caps
    if kind not in caps.kv_dtypes:
        pytest.skip("reads no such cache")
    exact = Scene(backend, [(9, 2), (0, 7)], layer()).run()
    dtype = torch.float8_e4m3fn if kind == "fp8_e4m3" else torch.float8_e5m2
    scene = Scene(backend, [(9, 2), (0, 7)], layer(), dtype)

    torch.testing.assert_close(scene.run(), exact, rtol=near, atol=1.5 * near)
    assert not scene.run().equal(exact)
