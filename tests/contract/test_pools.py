"""Every pool as bytes of pages: regions, transfers to and from the host, copies within it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sylvan.kernels.copy import native
from sylvan.runtime.core.memory import PageMemory, copy_tokens
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import GroupShape, KVShape, MHAPool
from sylvan.runtime.pool.none import NoPool
from sylvan.runtime.pool.pages import JoinedPages
from sylvan.runtime.pool.transfers import DeviceTransfers
from tests.support.delayed import DelayedPlatform

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, num_pages=6, page_size=16)
WIDE = KVShape(num_layers=3, num_kv_heads=2, head_dim=32, num_pages=6, page_size=16)
LATENT = KVShape(num_layers=3, num_kv_heads=1, head_dim=24, num_pages=6, page_size=16)
GROUPS = KVShape(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    num_pages=6,
    page_size=16,
    groups=(GroupShape((0, 2), 6), GroupShape((1,), 6)),
)


@dataclass(frozen=True)
class Case:
    """`make` a pool; `memories` are its groups, and `of_layers` the bytes of a page by layer."""

    make: Callable[[], Any]
    page_bytes: tuple[int, ...]


def tensors(pool: Any, group: int) -> list[torch.Tensor]:
    """The layers' views of a group, (num_pages, ...) each, in export order."""
    layers = [i for i, g in enumerate(pool.layer_groups) if g == group]
    if isinstance(pool, NativePool):
        sides = [x for i in layers for x in (pool.layers[i].keys, pool.layers[i].values)]
        return [torch.from_numpy(x) for x in sides if x.shape[1]]
    found = [pool.layer(i) for i in layers]
    return [pair[0] for pair in found] if isinstance(pool, LatentPool) else [*sum(found, ())]


def memories(pool: Any) -> list[PageMemory]:
    return list(pool.groups)


CASES = {
    "mha": Case(lambda: MHAPool(SHAPE, torch.float32), (3 * 2 * 16 * 2 * 8 * 4,)),
    "mha, bf16": Case(lambda: MHAPool(SHAPE, torch.bfloat16), (3 * 2 * 16 * 2 * 8 * 2,)),
    "mha, fp8": Case(lambda: MHAPool(SHAPE, torch.float8_e4m3fn), (3 * 2 * 16 * 2 * 8,)),
    "mha, groups": Case(
        lambda: MHAPool(GROUPS, torch.float32), (2 * 2 * 16 * 2 * 8 * 4, 2 * 16 * 2 * 8 * 4)
    ),
    "latent": Case(lambda: LatentPool(LATENT, 16, torch.bfloat16), (3 * 16 * 24 * 2,)),
    # heads are padded: keys to 32 columns, values to 16
    "native": Case(lambda: NativePool(SHAPE, torch.bfloat16), (3 * 2 * 16 * (32 + 16) * 2,)),
    "native, fp32": Case(lambda: NativePool(SHAPE, torch.float32), (3 * 2 * 16 * (32 + 16) * 4,)),
    "native, int8": Case(
        lambda: NativePool(SHAPE, torch.bfloat16, small="int8"),
        (3 * 2 * 16 * (32 + 4 + 16 + 4),),
    ),
    "native, fp8": Case(
        lambda: NativePool(SHAPE, torch.bfloat16, small="fp8_e4m3"),
        (3 * 2 * 16 * (32 + 4 + 16 + 4),),
    ),
    "native, int4": Case(
        lambda: NativePool(WIDE, torch.bfloat16, small="int4"),
        (3 * 2 * 2 * 16 * (32 // 2 + 4),),
    ),
    "native, latent": Case(
        lambda: NativePool(LATENT, torch.bfloat16, latent=16), (3 * 16 * 32 * 2,)
    ),
    "native, groups": Case(
        lambda: NativePool(GROUPS, torch.bfloat16),
        (2 * 2 * 16 * (32 + 16) * 2, 2 * 16 * (32 + 16) * 2),
    ),
}
EACH = pytest.mark.parametrize("name", CASES)


def filled(name: str, seed: int = 0) -> Any:
    """A pool whose every byte is random, written through what layers see."""
    pool = CASES[name].make()
    generator = np.random.default_rng(seed)
    for group in range(len(memories(pool))):
        for tensor in tensors(pool, group):
            bits = torch.from_numpy(generator.integers(0, 255, tensor.shape, np.uint8))
            tensor.copy_((bits.float() - 128).to(tensor.dtype))
    return pool


def rows(pool: Any, group: int, pages: list[int]) -> list[bytes]:
    """Bytes of pages as layers see them, page by page, without padding."""
    return [
        b"".join(x[page].contiguous().view(torch.uint8).numpy().tobytes() for x in seen)
        for seen in [tensors(pool, group)]
        for page in pages
    ]


def read(memory: PageMemory, page: int) -> bytes:
    """The bytes at the descriptors of a page, as a network card would read them."""
    return b"".join(ctypes.string_at(r.address, r.num_bytes) for r in memory.regions(page))


@EACH
def test_regions_are_the_bytes_that_layers_see(name):
    pool = filled(name)

    for group, memory in enumerate(memories(pool)):
        assert memory.page_bytes == CASES[name].page_bytes[group]
        assert memory.num_pages == 6
        for page in range(6):
            regions = memory.regions(page)
            assert sum(r.num_bytes for r in regions) == memory.page_bytes
            for mine, first in zip(regions, memory.regions(0), strict=True):
                assert mine.address == first.address + page * first.stride
            assert [read(memory, page)] == rows(pool, group, [page])


@EACH
def test_what_is_written_at_the_descriptors_is_what_layers_see(name):
    pool, other = filled(name), filled(name, seed=1)

    for group, memory in enumerate(memories(pool)):
        for theirs, mine in zip(memories(other)[group].regions(4), memory.regions(2), strict=True):
            ctypes.memmove(mine.address, theirs.address, theirs.num_bytes)
        before = filled(name)
        assert rows(pool, group, [2]) == rows(other, group, [4])
        assert rows(pool, group, [0, 1, 3, 4, 5]) == rows(before, group, [0, 1, 3, 4, 5])


@EACH
def test_exported_pages_come_back_elsewhere_bit_by_bit(name):
    source, target = filled(name), CASES[name].make()

    for group, (memory, other) in enumerate(zip(memories(source), memories(target), strict=True)):
        buffer = memory.host_buffer(3)
        sent = memory.export(np.array([5, 1, 2], np.int32), buffer, checksum=True)
        sent.wait()
        got = other.import_(np.array([2, 3, 5], np.int32), buffer, checksums=sent.checksums)
        got.wait()

        assert sent.done()
        assert got.done()
        assert sent.error is got.error is None
        assert sent.num_bytes == got.num_bytes == 3 * memory.page_bytes == len(buffer)
        assert rows(target, group, [2, 3, 5]) == rows(source, group, [5, 1, 2])
        assert not any(any(row) for row in rows(target, group, [0, 1, 4]))
        assert sent.checksums is not None
        assert len({*sent.checksums.tolist()}) == 3
        assert got.checksums is None


@EACH
def test_the_host_sees_page_after_page_region_after_region(name):
    pool = filled(name)

    for memory in memories(pool):
        buffer = memory.host_buffer(2)
        memory.export(np.array([3, 4]), buffer).wait()
        assert buffer.tobytes() == read(memory, 3) + read(memory, 4)


@EACH
def test_wrong_checksums_write_nothing_and_say_which(name):
    pool, other = filled(name), filled(name, seed=1)
    memory, pages = memories(pool)[0], np.array([1, 2, 3])
    buffer = memory.host_buffer(3)
    sent = memory.export(pages, buffer, checksum=True)
    sent.wait()
    buffer[memory.page_bytes + 7] ^= 1  # a bit of the second page

    got = memories(other)[0].import_(pages, buffer, checksums=sent.checksums)
    got.wait()

    assert got.done()
    assert got.error == "checksums of pages [1] of 3 are wrong"
    assert got.checksums is None
    assert rows(other, 0, [1, 2, 3]) == rows(filled(name, seed=1), 0, [1, 2, 3])


@EACH
@pytest.mark.parametrize("compiled", [True, False], ids=["native", "reference"])
def test_copies_take_the_first_tokens_of_pages(name, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    pool, before = filled(name), filled(name)
    memory = memories(pool)[0]
    whole = isinstance(pool, NativePool) or memory.page_size == 1
    tokens = 1 if memory.page_size == 1 else 9

    # page 4 is read by the first copy and written by the second, as when it was evicted meanwhile
    memory.copy_tokens([(4, 1, tokens), (2, 4, tokens), (5, 3, memory.page_size)])

    for new, old in zip(tensors(pool, 0), tensors(before, 0), strict=True):
        kept = slice(None) if whole else slice(tokens)
        got, was = (x.contiguous().view(torch.uint8) for x in (new, old))
        assert torch.equal(got[1][kept], was[4][kept])
        assert torch.equal(got[4][kept], was[2][kept])
        assert torch.equal(got[3], was[5])
        assert torch.equal(got[[0, 2, 5]], was[[0, 2, 5]])
        if not whole:
            assert torch.equal(got[1][tokens:], was[1][tokens:])
            assert torch.equal(got[4][tokens:], was[4][tokens:])


def test_a_step_copies_in_the_groups_that_are_named():
    pool, before = filled("mha, groups"), filled("mha, groups")

    copy_tokens(pool.groups, [(1, 2, 16, 1), (3, 4, 16, 0), (5, 3, 16, 1)])

    assert rows(pool, 0, [4]) == rows(before, 0, [3])
    assert rows(pool, 1, [2, 3]) == rows(before, 1, [1, 5])
    assert rows(pool, 0, [2, 3]) == rows(before, 0, [2, 3])
    with pytest.raises(ValueError, match="KV group 2: there are 2"):
        copy_tokens(pool.groups, [(1, 2, 16, 2)])


def test_groups_have_as_many_pages_as_they_need():
    shape = KVShape(
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        num_pages=9,
        page_size=16,
        groups=(GroupShape((1,), 9), GroupShape((0, 2), 3)),
    )

    for pool in (MHAPool(shape, torch.bfloat16), NativePool(shape, torch.bfloat16)):
        assert pool.layer_groups == (1, 0, 1)
        assert [group.num_pages for group in pool.groups] == [9, 3]
        assert pool.groups[1].page_bytes == 2 * pool.groups[0].page_bytes
    keys, values = MHAPool(shape, torch.bfloat16).layer(2)
    assert keys.shape == values.shape == (3, 16, 2, 8)
    pages = NativePool(shape, torch.bfloat16).layers
    assert [pages[i].group for i in range(3)] == [1, 0, 1]
    assert [len(pages[i].keys) for i in range(3)] == [3, 9, 3]


def test_pages_of_a_program_are_whole():
    """One region: whoever moves pages moves each in one piece."""
    for name in ("native", "native, int8", "native, latent"):
        for memory in memories(CASES[name].make()):
            (region,) = memory.regions(1)
            assert region.num_bytes == region.stride == memory.page_bytes


@EACH
def test_what_cannot_be_moved_is_refused_at_once(name):
    memory = memories(CASES[name].make())[0]
    pages, buffer = np.array([1, 2]), memory.host_buffer(2)

    with pytest.raises(ValueError, match=r"must be in 0\.\.5"):
        memory.export(np.array([1, 6]), buffer)
    with pytest.raises(ValueError, match=r"must be in 0\.\.5"):
        memory.import_(np.array([-1]), buffer)
    with pytest.raises(ValueError, match=r"must be in 0\.\.5"):
        memory.copy_tokens([(1, 6, 1)])
    with pytest.raises(ValueError, match=r"must be in 0\.\.5"):
        memory.regions(6)
    with pytest.raises(ValueError, match="tokens"):
        memory.copy_tokens([(1, 2, memory.page_size + 1)])
    with pytest.raises(ValueError, match=f"the buffer has {len(buffer) - 1}"):
        memory.export(pages, buffer[:-1])
    with pytest.raises(ValueError, match="once"):
        memory.import_(np.array([2, 2]), buffer)
    with pytest.raises(ValueError, match="1 checksums for 2 pages"):
        memory.import_(pages, buffer, checksums=np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="of type uint8"):
        memory.export(pages, np.zeros(2 * memory.page_bytes, np.int16))
    with pytest.raises(ValueError, match="contiguous"):
        memory.export(pages, np.zeros(4 * memory.page_bytes, np.uint8)[::2])
    sealed = np.zeros(2 * memory.page_bytes, np.uint8)
    sealed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        memory.export(pages, sealed)
    memory.import_(pages, sealed).wait()  # as of a file that was mapped


def test_pages_that_lie_beside_others_are_moved_with_them():
    first, second = MHAPool(SHAPE, torch.float32).groups[0], NativePool(LATENT, torch.float32)
    parts = [first, second.groups[0]]
    joined = JoinedPages(parts)
    rng = np.random.default_rng(5)
    for part in parts:
        part.memory.copy_(torch.from_numpy(rng.integers(0, 256, part.memory.shape, np.uint8)))
    before = [part.memory.clone() for part in parts]
    pages, others = np.array([4, 1], np.int32), np.array([0, 5], np.int32)
    host = joined.host_buffer(2)
    out = joined.export(pages, host, checksum=True)
    out.wait()

    assert out.error is None
    assert joined.page_bytes == sum(part.page_bytes for part in parts) == len(host) // 2
    for number, page in enumerate(pages):
        own = host[number * joined.page_bytes :][: joined.page_bytes]
        wanted = [memory[:, page].flatten().numpy() for memory in before]
        assert np.array_equal(own, np.concatenate(wanted))
        sizes = [region.num_bytes for region in joined.regions(int(page))]
        assert sum(sizes) == joined.page_bytes
    back = joined.import_(others, host, checksums=out.checksums)
    back.wait()
    assert back.error is None
    for part, memory in zip(parts, before, strict=True):
        for source, target in zip(pages, others, strict=True):
            assert torch.equal(part.memory[:, target], memory[:, source])
    host[3] ^= 1
    wrong = joined.import_(pages, host, checksums=out.checksums)
    wrong.wait()
    assert wrong.error is not None
    with pytest.raises(ValueError, match="each page once"):
        joined.import_(np.array([1, 1], np.int32), host)
    with pytest.raises(ValueError, match=r"must be in 0\.\.5"):
        joined.export(np.array([6, 0], np.int32), host)


def test_nothing_is_moved_of_no_pages():
    for name in CASES:
        memory = memories(CASES[name].make())[0]
        none, buffer = np.array([], np.int32), np.zeros(0, np.uint8)
        sent = memory.export(none, buffer, checksum=True)
        sent.wait()
        assert sent.error is None
        assert sent.checksums is not None
        assert len(sent.checksums) == 0
        memory.import_(none, buffer).wait()
        memory.copy_tokens([])
    assert NoPool(4, 16).groups[0].page_bytes == 0


@pytest.mark.parametrize("checked", [False, True])
def test_on_a_device_a_transfer_follows_the_steps_and_waits_for_nothing(checked):
    """Work of this platform is done when an event is waited for: what does not wait sees zeros."""
    platform = DelayedPlatform()
    pool = MHAPool(SHAPE, torch.float32, transfers=DeviceTransfers(platform))
    memory, pages = pool.groups[0], np.array([2, 1])
    keys = pool.layer(1)[0]
    buffer = memory.host_buffer(2)
    platform.stream().run(lambda: keys.fill_(3.0))  # a step that is under way

    with platform.unsynced():
        sent = memory.export(pages, buffer, checksum=checked)
        if not checked:
            assert not sent.done()
            assert not buffer.any()
    pages[:] = 0  # the caller's own
    sent.wait()

    assert sent.done()
    assert sent.error is None
    assert (sent.checksums is not None) == checked
    assert buffer.tobytes() == read(memory, 2) + read(memory, 1)
    assert np.count_nonzero(buffer.view(np.float32) == 3.0) == 2 * 16 * 2 * 8

    platform.stream().run(lambda: keys.fill_(0.0))
    got = memory.import_(np.array([4, 5]), buffer, checksums=sent.checksums)
    got.wait()

    assert got.error is None
    assert keys[[4, 5]].eq(3.0).all()
    assert not keys[:4].any()


def test_a_device_that_fails_is_reported_by_the_transfer():
    platform = DelayedPlatform()
    pool = MHAPool(SHAPE, torch.float32, transfers=DeviceTransfers(platform))
    memory = pool.groups[0]

    def fail() -> None:
        raise RuntimeError("the device is lost")

    for checked in (False, True):
        platform.stream().run(fail)
        sent = memory.export(np.array([1]), memory.host_buffer(1), checksum=checked)
        sent.wait()
        assert sent.done()
        assert sent.error == "the device is lost"
        assert sent.checksums is None


def test_a_device_without_a_platform_says_so():
    memory = MHAPool(SHAPE, torch.float32, "meta").groups[0]

    with pytest.raises(ValueError, match="cannot transfer pages to the host"):
        memory.export(np.array([1]), np.zeros(memory.page_bytes, np.uint8))
