"""How the host tier keeps pages, and how large it may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.features.tiers.codec import BLOCK, Int8Codec, PlainCodec
from sylvan.runtime.features.tiers.host_memory import HostMemory, HostSize, lay_out

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def through(codec, page: np.ndarray) -> np.ndarray:
    kept = np.full(codec.encoded_bytes, 77, np.uint8)
    codec.encode(page, kept)
    found = np.full(codec.page_bytes, 99, np.uint8)
    codec.decode(kept, found)
    return found


@given(st.binary(min_size=1, max_size=300))
def test_plain_pages_keep_their_bits(data):
    page = np.frombuffer(data, np.uint8)
    assert through(PlainCodec(len(page)), page).tobytes() == data


@given(
    name=st.sampled_from([*TYPES]),
    count=st.integers(1, 200),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_rounded_numbers_are_near(name, count, scale, seed):
    torch.manual_seed(seed)
    values = (torch.randn(count) * scale).to(TYPES[name])
    page = values.view(torch.uint8).numpy()
    found = torch.from_numpy(through(Int8Codec(len(page), name), page)).view(TYPES[name])
    for block, near in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        largest = float(block.float().abs().max())
        bound = largest / 254 * 1.001 + largest * EPSILON[name] + 1e-7
        assert float((block.float() - near.float()).abs().max()) <= bound


@pytest.mark.parametrize("name", TYPES)
def test_what_is_not_finite_stays_so_and_harms_no_other_block(name):
    values = torch.ones(3 * BLOCK, dtype=TYPES[name])
    values[BLOCK] = float("inf")
    page = values.view(torch.uint8).numpy()
    found = torch.from_numpy(through(Int8Codec(len(page), name), page)).view(TYPES[name])
    assert not torch.isfinite(found[BLOCK : 2 * BLOCK]).all()
    assert (found[:BLOCK] == 1).all()
    assert (found[2 * BLOCK :] == 1).all()


def test_eight_bits_take_about_half_of_sixteen():
    assert Int8Codec(1 << 16, "bfloat16").encoded_bytes == (1 << 15) * (BLOCK + 4) // BLOCK


GROUPS = (
    KVGroup(name="full", kind="full", num_pages=100, page_size=16),
    KVGroup(name="states", kind="state", num_pages=10, page_size=1),
)


def sized(ratio=None, num_bytes=None, dtype="same", free=1 << 40):
    return lay_out(HostSize(ratio, num_bytes, dtype), GROUPS, (4096, 512), "bfloat16", free)


def test_groups_share_the_host_tier_as_they_share_the_device():
    assert sized(ratio=2.0).slots == (200, 20)
    whole = 100 * 4096 + 10 * 512
    assert sized(num_bytes=whole).slots == (100, 10)
    rounded = sized(num_bytes=whole, dtype="int8")
    assert rounded.slots[0] > 180
    assert rounded.num_bytes <= whole
    assert isinstance(rounded.codecs[1], PlainCodec), "recurrent states are not rounded"


def test_sizes_that_cannot_be_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"tiers\.host_ratio=0\.05: no page of each KV group"):
        sized(ratio=0.05)
    with pytest.raises(ConfigError, match=r"tiers\.host_bytes=512: no page"):
        sized(num_bytes=512)
    with pytest.raises(ConfigError, match=r"tiers\.host_ratio=2\.0 takes .* at most 800 may be"):
        sized(ratio=2.0, free=1000)


def test_slots_keep_what_was_written_to_them():
    memory = HostMemory(sized(ratio=1.0))
    pages = {slot: np.full(4096, slot, np.uint8) for slot in (0, 7, 99)}
    for slot, page in pages.items():
        assert memory.write(0, slot, page) == 4096
    memory.write(1, 7, np.full(512, 200, np.uint8))
    for slot, page in pages.items():
        found = np.empty(4096, np.uint8)
        memory.read(0, slot, found)
        assert (found == page).all()
