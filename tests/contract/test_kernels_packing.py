"""Numbers that are rounded and packed in one pass: the native kernels against PyTorch's steps."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.pack import form_of, pack, pack_stack
from sylvan.kernels.matmul.weights import Form, PlainRows, quantise_int4, quantise_int8
from sylvan.kernels.native import packing
from sylvan.kernels.native.library import load
from tests.support.native import DTYPES, variants

ROUNDED = {
    "dense": lambda w: w,
    "int8": quantise_int8,
    "int4, groups of 32": lambda w: quantise_int4(w, 32),
    "int4, groups of 64": lambda w: quantise_int4(w, 64),
    "int4, groups of 128": lambda w: quantise_int4(w, 128),
}
SHAPES = [(1, 128), (16, 256), (33, 384), (500, 896), (21, 130), (7, 33), (40, 1)]


@pytest.fixture(params=variants(), autouse=True)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    library = load(request.param)
    library.dll.sylvan_threads(2)
    monkeypatch.setattr(packing, "library", lambda: library)


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """With rows of zeros, of equal magnitudes, of the least and of the largest numbers."""
    made = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.02
    made[0::7] = 0
    made[1::7] = torch.where(made[1::7] < 0, -0.5, 0.5)
    made[2::7] *= 1e-37
    made[3::7] *= 1e37
    return made.to(dtype)


def shapes_of(kind: str) -> list[tuple[int, int]]:
    group = int(kind.rpartition(" ")[2]) if "groups" in kind else 1
    return [shape for shape in SHAPES if shape[1] % group == 0]


def assert_same(one, other) -> None:
    assert one.parts.keys() == other.parts.keys()
    for name, part in one.parts.items():
        assert (part == other.parts[name]).all(), name


CASES = [(kind, shape) for kind in ROUNDED for shape in shapes_of(kind)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_as_rounded_and_packed_one_after_the_other(kind, shape, dtype):
    old, new = (numbers(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    want, made = pack(ROUNDED[kind](new), dtype), pack(ROUNDED[kind](old), dtype)

    for first, last in ((0, shape[0] // 3), (shape[0] // 3, shape[0])):
        assert packing.pack_rows(new[first:last], made, first)

    assert_same(made, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_a_few_rows_at_a_time(kind, shape, dtype):
    rows, cols = shape
    stack = numbers(3 * rows, cols, dtype=dtype).view(3, rows, cols)
    for weight, packer in ((stack[0], pack), (stack, pack_stack)):
        rounded = ROUNDED[kind](weight)
        plain = PlainRows(form_of(rounded), lambda w=weight: iter(w.reshape(-1, cols).split(9)))

        assert_same(packing.pack_plain(plain, weight.shape, dtype), packer(rounded, dtype))


def test_groups_without_a_kernel_are_refused():
    plain = PlainRows(Form("int4", 48), lambda: iter(()))
    with pytest.raises(Unsupported, match="groups of 48"):
        packing.pack_plain(plain, torch.Size((16, 96)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_lie_apart_or_turned(dtype):
    whole = numbers(80, 200, dtype)
    for rows in (whole[:, 8:136], whole[:, :128].T, whole[::2, :64]):
        made = pack(torch.zeros_like(rows), dtype)
        assert packing.pack_rows(rows, made)
        assert_same(made, pack(rows, dtype))


@pytest.mark.parametrize("kind", ["int8", "int4, groups of 64"])
def test_rows_of_a_stack_are_counted_over_its_matrices(kind):
    old, new = (numbers(3 * 20, 128, torch.bfloat16, seed) for seed in (1, 2))
    stack, want = (
        pack_stack(ROUNDED[kind](x.view(3, 20, 128)), torch.bfloat16)
        for x in (old, torch.cat((old[:15], new[15:55], old[55:])))
    )

    assert packing.repack_rows(new[15:55], stack, 15, 3)

    assert_same(stack, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_seen_wherever_they_are(kind, dtype, wrong):
    plain = numbers(50, 384, dtype)
    packed = pack(ROUNDED[kind](plain), dtype)
    for row, col in ((0, 0), (15, 383), (16, 17), (49, 200), (49, 383)):
        spoilt = plain.clone()
        spoilt[row, col] = wrong
        assert not packing.pack_rows(spoilt, packed), (row, col)
    assert packing.pack_rows(plain, packed)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 400_001])
def test_all_numbers_are_looked_at(dtype, count):
    most = torch.finfo(dtype).max
    plain = torch.full((count,), most, dtype=dtype)
    plain[::2] = -most
    assert packing.all_finite(plain)
    for place in {0, count // 2, count - 1} if count else ():
        for wrong in (torch.nan, torch.inf, -torch.inf):
            spoilt = plain.clone()
            spoilt[place] = wrong
            assert not packing.all_finite(spoilt), (place, wrong)
            assert not packing.all_finite(torch.stack((plain, spoilt), 1)[:, 1])
