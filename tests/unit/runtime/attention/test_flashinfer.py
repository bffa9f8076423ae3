"""Arguments for FlashInfer, checked by a library with its interface that computes in PyTorch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.paged import reference
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.flashinfer import FlashInferAttention, paged_index
from sylvan.runtime.platform.find import load_kinds, open_platform
from tests.parity.serving import Serving
from tests.support.on_device import OnDevice
from tests.support.paged_batch import H, K, N, batch_of
from tests.support.random_model import write_random_model


class Wrapper:
    """As flashinfer.BatchPrefillWithPagedKVCacheWrapper with layout NHD."""

    def __init__(self, room, layout) -> None:
        assert layout == "NHD"
        self.plans = 0

    def plan(self, rows, starts, pages, last, heads, kv_heads, dim, size, **options) -> None:
        self.plans += 1
        self.parts = rows, starts, pages, last
        self.size = size
        self.spec = AttentionLayer(
            index=0,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=options["sm_scale"],
            window=options["window_left"] + 1 or None,
            softcap=options["logits_soft_cap"],
            causal=options["causal"],
        )

    def run(self, q, kv):
        rows, starts, pages, last = (x.tolist() for x in self.parts)
        out = torch.empty_like(q)
        for r in range(len(last)):
            mine = pages[starts[r] : starts[r + 1]]
            length = (len(mine) - 1) * self.size + last[r]
            k, v = (side[mine].flatten(0, 1)[:length] for side in kv)
            own = slice(rows[r], rows[r + 1])
            out[own] = reference.attend(q[own], k, v, self.spec).unflatten(1, q.shape[1:])
        return out


def test_index_names_pages_and_what_the_last_one_holds():
    index = paged_index(batch_of([(0, 5), (3, 1), (7, 4)]))

    assert index.q_starts.tolist() == [0, 5, 6, 10]
    assert index.starts.tolist() == [0, 2, 3, 6]
    assert index.pages.tolist() == [2, 1, 3, 6, 5, 4]
    assert index.last_lens.tolist() == [1, 4, 3]


@pytest.mark.parametrize("changes", [{}, {"window": 3, "softcap": 5.0}], ids=["plain", "window"])
def test_result_is_that_of_the_definition_with_one_plan_for_all_layers(changes):
    made = []

    def make(room, layout):
        made.append(Wrapper(room, layout))
        return made[-1]

    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=make)
    backend = FlashInferAttention(library, device="cpu")
    batch = batch_of([(0, 5), (0, 1), (0, 4)])
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

    assert [wrapper.plans for wrapper in made] == [1]


def test_the_way_of_steps_on_devices_tells_it_where_requests_lie(tmp_path):
    """Nothing of a step is on the device only: the library plans on the host."""
    path = write_random_model(tmp_path, context_len=64)
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    build = OnDevice(
        open_platform(load_kinds(())["cpu"]),
        graph=False,
        attention=FlashInferAttention(library, device="cpu"),
    )
    prompts = [[5, 9, 200, 31], [7] * 37]

    found = Serving(path, overlap=True, build=build).generate(prompts, max_new_tokens=6)

    assert found == Serving(path).generate(prompts, max_new_tokens=6)


def test_what_is_handed_over_has_the_names_of_the_library():
    """Where it is installed; its wheel needs no GPU to be imported."""
    flashinfer = pytest.importorskip("flashinfer")
    plan = flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan
    names = ("head_dim_vo", "causal", "sm_scale", "window_left", "logits_soft_cap")
    more = dict.fromkeys((*names, "q_data_type", "kv_data_type"))

    inspect.signature(plan).bind(None, *range(8), **more)


def test_sinks_are_refused_in_words():
    backend = FlashInferAttention(SimpleNamespace(), device="cpu")
    sinks = AttentionLayer(
        index=0, num_heads=N, num_kv_heads=K, head_dim=H, scale=1.0, sinks=torch.zeros(N)
    )

    with pytest.raises(ConfigError, match="leave attention at auto"):
        backend.run(sinks, *(torch.zeros(1, 1, H),) * 3, batch_of([(0, 1)]))


def test_a_missing_package_says_how_to_get_it():
    with pytest.raises(ConfigError, match=r"pip install 'sylvan\[flashinfer\]'"):
        FlashInferAttention()
