"""Library choice, memory, buffer placement and packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sylvan.kernels import build
from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.pack import pack, pack_nothing
from sylvan.kernels.matmul.weights import Int4Weight, quantise_int4, quantise_int8
from sylvan.kernels.memory import allocate
from sylvan.kernels.native import library
from sylvan.kernels.native.binding import Kind
from sylvan.kernels.native.library import LibraryMissing, describe, load
from sylvan.kernels.native.plan import Call, Draft, place


def call(*buffers: int | None) -> Call:
    return Call(Kind.ADD, "tokens", "f32", buffers, (1,))


def test_a_missing_library_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match=r"python -m sylvan\.kernels\.build"):
        load(folder=tmp_path)

    description = describe(tmp_path)

    assert description.variant is None
    assert "python -m sylvan.kernels.build" in "\n".join(description.lines)


def test_a_broken_library_is_reported_not_raised(tmp_path: Path) -> None:
    (tmp_path / "libsylvan_portable.so").write_bytes(b"not a library")

    assert "cannot be loaded" in "\n".join(describe(tmp_path).lines)


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_an_unknown_variant_names_the_known_ones() -> None:
    with pytest.raises(LibraryMissing, match="avx2, portable"):
        load("sse")


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_a_library_with_other_ops_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "Kind", [*Kind, "one that it was compiled without"])

    with pytest.raises(LibraryMissing, match="no compiled kernels can run here"):
        load.__wrapped__()
    assert "compiled from other sources" in "\n".join(library.usable().values())


def test_without_a_compiler_every_variant_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)

    built = build.build(tmp_path)

    assert not built.libraries
    assert set(built.failures) == set(build.VARIANTS)


@pytest.mark.parametrize("size", [1, 1000, 5 << 20])
def test_memory_is_aligned_and_zero(size: int) -> None:
    memory = allocate(size)

    assert memory.ctypes.data % 64 == 0
    assert len(memory) == size
    assert not memory.any()


def test_dead_buffers_are_used_again() -> None:
    draft = Draft()
    a, b, c = (draft.buffer(64) for _ in range(3))
    draft.calls = [call(a), call(a, b), call(b, c)]

    placed = place(draft)

    assert placed.home[c] == placed.home[a] != placed.home[b]
    assert placed.ops["buf"][2][0] == placed.home[b]


def test_pinned_buffers_and_inputs_are_kept_apart() -> None:
    draft = Draft()
    given, first, kept, last = (draft.buffer(64) for _ in range(4))
    draft.inputs, draft.pinned = [given], {kept}
    constant = draft.constant(np.zeros(8, np.uint8))
    draft.calls = [call(first, constant, None), call(kept), call(given, last)]

    placed = place(draft)

    assert len({placed.home[i] for i in (given, kept, last)}) == 3
    assert placed.ops["buf"][0].tolist()[1:3] == [0, -1]


def test_packed_words_lie_in_blocks_of_sixteen_outputs() -> None:
    weight = torch.arange(20 * 34).view(20, 34).bfloat16()

    packed = pack(weight, torch.bfloat16)

    words = torch.from_numpy(packed.data.view(np.int16)).view(torch.bfloat16).view(2, 32, 16, 2)
    assert packed.padded_rows == 32
    assert words[1, 3, 2].tolist() == weight[18, 6:8].tolist()
    assert not words[1, :, 4:].any()
    assert not words[:, 17:].any()


@pytest.mark.parametrize("make", [quantise_int8, lambda w: quantise_int4(w, 32)])
def test_a_rehearsal_finds_the_same_shape(make) -> None:
    weight = make(torch.randn(40, 96, generator=torch.Generator().manual_seed(0)))

    real, rehearsed = pack(weight, torch.bfloat16), pack_nothing(weight, torch.bfloat16)

    assert (rehearsed.kind, rehearsed.rows, rehearsed.cols) == (real.kind, real.rows, real.cols)
    assert rehearsed.padded_rows == real.padded_rows
    assert not len(rehearsed.data)


@pytest.mark.parametrize("how", [pack, pack_nothing])
def test_an_odd_group_is_unsupported(how) -> None:
    q = torch.zeros(16, 24, dtype=torch.uint8)
    with pytest.raises(Unsupported, match="groups of 48"):
        how(Int4Weight(q, torch.zeros(16, 1), 48), torch.bfloat16)


def test_quantised_weights_are_near_the_original() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(64)

    int8 = (quantise_int8(weight).rows(rows) - weight).norm() / weight.norm()
    int4 = (quantise_int4(weight, 64).rows(rows) - weight).norm() / weight.norm()

    assert int8 < 0.01
    assert int4 < 0.11


def test_quantising_zeros_gives_zeros() -> None:
    zeros = torch.zeros(16, 64)
    rows = torch.arange(16)

    assert not quantise_int8(zeros).rows(rows).any()
    assert not quantise_int4(zeros, 64).rows(rows).any()
