"""Library choice, memory, buffer placement and packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sylvan.kernels import build
from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.pack import check_packable, pack
from sylvan.kernels.matmul.weights import Int4Weight, quantise_int4, quantise_int8
from sylvan.kernels.memory import allocate
from sylvan.kernels.native import library
from sylvan.kernels.native.graph import Graph, ProgramLimits
from sylvan.kernels.native.layout import plan_memory
from sylvan.kernels.native.library import LibraryMissing, describe, load
from sylvan.kernels.native.opset import Add, Linear
from sylvan.kernels.native.schema import fields_of


def graph_of(count: int) -> tuple[Graph, list[int]]:
    graph = Graph(ProgramLimits(max_tokens=1, max_outputs=1), torch.float32)
    return graph, [graph.buffer(64) for _ in range(count)]


def add(a: int, b: int, out: int) -> Add:
    return Add(a=a, b=b, out=out, cols=1)


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
    monkeypatch.setattr(library, "ops_digest", lambda: "of one op more")

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
    graph, (a, b, c) = graph_of(3)
    graph.ops = [add(a, a, a), add(a, a, b), add(b, b, c)]

    layout = plan_memory(graph)

    assert layout.home[c] == layout.home[a] != layout.home[b]
    assert layout.records["operands"][2][:3].tolist() == [layout.home[b]] * 2 + [layout.home[c]]


def test_pinned_buffers_and_inputs_are_kept_apart() -> None:
    graph, (given, first, kept, last) = graph_of(4)
    graph.inputs, graph.pinned = [given], {kept}
    constant = graph.constant(np.zeros(8, np.uint8))
    graph.ops = [add(first, constant, first), add(kept, kept, kept), add(given, given, last)]

    layout = plan_memory(graph)

    assert len({layout.home[i] for i in (given, kept, last)}) == 3
    assert layout.records["operands"][0][1] == 0


def test_absent_buffers_are_minus_one() -> None:
    graph, (x, out) = graph_of(2)
    linear = Linear(x=x, weight=graph.constant(np.zeros(8, np.uint8)), out=out, cols=4, outputs=32)
    graph.ops = [linear]

    numbers = plan_memory(graph).records["operands"][0].tolist()

    names = [part.name for part in fields_of(Linear)]
    found = dict(zip(names, numbers, strict=False))
    assert found["bias"] == found["groups"] == -1
    assert (found["cols"], found["outputs"]) == (4, 32)


def test_packed_words_lie_in_blocks_of_sixteen_outputs() -> None:
    weight = torch.arange(20 * 34).view(20, 34).bfloat16()

    packed = pack(weight, torch.bfloat16)

    words = torch.from_numpy(packed.data.view(np.int16)).view(torch.bfloat16).view(2, 32, 16, 2)
    assert packed.padded_rows == 32
    assert words[1, 3, 2].tolist() == weight[18, 6:8].tolist()
    assert not words[1, :, 4:].any()
    assert not words[:, 17:].any()


@pytest.mark.parametrize("how", [lambda w: pack(w, torch.bfloat16), check_packable])
def test_an_odd_group_is_unsupported(how) -> None:
    q = torch.zeros(16, 24, dtype=torch.uint8)
    with pytest.raises(Unsupported, match="groups of 48"):
        how(Int4Weight(q, torch.zeros(16, 1), 48))


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
