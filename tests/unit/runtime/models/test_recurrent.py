"""How a step is divided for models that keep states, and the cache they are given."""

from __future__ import annotations

import torch

from sylvan.runtime.models.config import StatePart
from sylvan.runtime.models.recurrent import Group, ProbeCache, SlotCache, groups
from sylvan.runtime.pool.states import TensorStates


def test_single_tokens_run_together_and_prompts_are_cut_at_saves():
    found = groups([0, 1, 6, 7], ((1, 2, 9), (2, 1, 8)))

    assert found == [
        Group((1, 2), (1,), (9,)),
        Group((3, 4, 5), (1,), (0,)),
        Group((0, 6), (0, 2), (0, 8)),
    ]


def test_conv_states_keep_the_last_inputs():
    pool = TensorStates([((2, 3), torch.float32)], 3)
    cache = SlotCache(pool, {("conv", 0, 0): 0}, torch.tensor([1, 2]))

    whole = cache.update_conv_state(torch.arange(8.0).view(2, 2, 2), 0)
    cache.flush()

    assert whole.shape == (2, 2, 5)
    assert pool.part(0)[1].tolist() == [[0, 0, 1], [0, 2, 3]]
    assert pool.part(0)[2].tolist() == [[0, 4, 5], [0, 6, 7]]
    assert not pool.part(0)[0].any()


def test_states_changed_in_place_are_written_back():
    pool = TensorStates([((4,), torch.float32)], 2)
    cache = SlotCache(pool, {("recurrent", 5, 1): 0}, torch.tensor([1]))

    cache.get_recurrent_state(5, 1).add_(2.0)
    cache.flush()

    assert pool.part(0)[1].tolist() == [2.0] * 4


def test_probe_notes_shapes_in_order():
    probe = ProbeCache()
    probe.update_conv_state(torch.empty(1, 6, 3, dtype=torch.bfloat16), 0, conv_kernel_size=4)
    probe.update_recurrent_state(torch.empty(1, 2, 3, 5), 0)

    assert probe.states == {
        ("conv", 0, 0): StatePart((6, 4), exact=False),
        ("recurrent", 0, 0): StatePart((2, 3, 5), exact=True),
    }
