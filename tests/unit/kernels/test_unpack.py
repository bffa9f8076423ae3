"""Weights come back out of kernel order as they went in, and others are written over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.codes import bits_of, packed_bits_of
from sylvan.kernels.matmul.pack import pack, pack_stack, repack
from sylvan.kernels.matmul.unpack import unpack, unpack_stack
from sylvan.kernels.matmul.weights import (
    Int4Weight,
    Int8Weight,
    quantise_int4,
    quantise_int8,
)
from tests.support.coded import KINDS, STEPPED, coded, stepped


def matrix(kind: str, seed: int, *shape: int):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "int8":
        return quantise_int8(weight)
    if kind == "int4":
        return quantise_int4(weight, 32)
    return weight.to(torch.bfloat16 if kind == "bf16" else torch.float32)


def dtype_of(kind: str) -> torch.dtype:
    return torch.float32 if kind == "f32" else torch.bfloat16


def assert_same(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        return
    assert isinstance(one, Int8Weight | Int4Weight)
    assert torch.equal(one.q, other.q)
    assert torch.equal(one.scale, other.scale)
    if isinstance(one, Int4Weight):
        assert one.group == other.group


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["f32", "bf16", "int8", "int4"]), st.integers(1, 70), st.integers(1, 5))
def test_what_was_packed_comes_back(kind, rows, groups):
    weight = matrix(kind, rows, rows, 32 * groups)
    packed = pack(weight, dtype_of(kind))

    assert_same(unpack(packed, dtype_of(kind)), weight)

    other = matrix(kind, rows + 1, rows, 32 * groups)
    repack(other, packed, dtype_of(kind))
    assert_same(unpack(packed, dtype_of(kind)), other)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_come_back(kind):
    weight, other = (coded(kind, 50, 384, seed=seed) for seed in (1, 2))
    packed = pack(weight, torch.bfloat16)

    assert_same_parts(unpack(packed, torch.bfloat16), weight)
    q, *rest = (part.nbytes for part in weight.tensors)
    assert packed.num_bytes >= sum(rest) + q * packed_bits_of(weight.code) // bits_of(weight.code)

    repack(other, packed, torch.bfloat16)
    assert_same_parts(unpack(packed, torch.bfloat16), other)

    odd = coded(kind, 50, 48, group=16)  # rows are padded to 64 inputs
    assert_same_parts(unpack(pack(odd, torch.bfloat16), torch.bfloat16), odd)

    stack = pack_stack(weight[:48].stacked(3), torch.float32)
    assert_same_parts(unpack_stack(stack, 3, torch.float32), weight[:48].stacked(3))


@pytest.mark.parametrize("kind", STEPPED)
def test_steps_of_scales_come_back(kind):
    weight, other = (stepped(kind, 50, 512, seed=seed) for seed in (1, 2))
    packed = pack(weight, torch.bfloat16)

    assert_same_parts(unpack(packed, torch.bfloat16), weight)

    repack(other, packed, torch.bfloat16)
    assert_same_parts(unpack(packed, torch.bfloat16), other)

    stack = pack_stack(weight[:48].stacked(3), torch.float32)
    assert_same_parts(unpack_stack(stack, 3, torch.float32), weight[:48].stacked(3))

    with pytest.raises(Unsupported, match="in the place of"):
        repack(weight.expanded(), packed, torch.bfloat16)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4.625), ("Q6_K", 6.5625)])
def test_steps_of_scales_take_few_bits(kind, bits):
    packed = pack(stepped(kind, 64, 512), torch.bfloat16)

    assert packed.num_bytes * 8 / (64 * 512) == bits


def test_codes_of_another_form_are_not_written_over():
    packed = pack(coded("int4 g32", 50, 384), torch.bfloat16)

    for other in (coded("int4 g32", 50, 320), coded("int8 g128", 50, 384), quantise_int8):
        weight = other if not callable(other) else other(torch.ones(50, 384))
        with pytest.raises(Unsupported, match="in the place of"):
            repack(weight, packed, torch.bfloat16)


def assert_same_parts(one, other) -> None:
    assert one.form == other.form
    assert all(a.equal(b) for a, b in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
def test_repacked_bytes_are_those_of_packing_again(kind):
    weight, other = matrix(kind, 1, 48, 96), matrix(kind, 2, 48, 96)
    packed, other_packed = pack(weight, dtype_of(kind)), pack(other, dtype_of(kind))

    repack(other, packed, dtype_of(kind))

    for one, two in zip(
        (packed.data, packed.scale, packed.sums),
        (other_packed.data, other_packed.scale, other_packed.sums),
        strict=True,
    ):
        assert (one is None) == (two is None)
        assert one is None or one.tobytes() == two.tobytes()


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
def test_stacks(kind):
    weight, other = matrix(kind, 1, 3, 40, 64), matrix(kind, 2, 3, 40, 64)
    packed = pack_stack(weight, dtype_of(kind))
    assert_same(unpack_stack(packed, 3, dtype_of(kind)), weight)

    repack(other, packed, dtype_of(kind))
    assert_same(unpack_stack(packed, 3, dtype_of(kind)), other)


@pytest.mark.parametrize(
    ("there", "given_"),
    [("f32", ("int8", 48, 64)), ("int8", ("f32", 48, 64)), ("f32", ("f32", 47, 64))],
)
def test_another_kind_or_shape_is_refused_and_changes_nothing(there, given_):
    packed = pack(matrix(there, 1, 48, 64), dtype_of(there))
    before = packed.data.tobytes()

    with pytest.raises(Unsupported):
        repack(matrix(given_[0], 2, *given_[1:]), packed, dtype_of(there))

    assert packed.data.tobytes() == before
