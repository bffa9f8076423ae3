"""Blocks of GGUF stand for the numbers that gguf-py takes them for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.checkpoints.gguf.quants import library
from sylvan.config.facts import GGUF_BITS, GGUF_DEVICE_BITS
from sylvan.kernels.matmul.pack import pack
from sylvan.kernels.matmul.weights import join
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats import gguf as reading
from sylvan.runtime.models.formats.gguf import KEPT, GgufBlocks

pytest.importorskip("gguf")

from tests.support.gguf_files import encoded

gguf = library()

NAME = "layers.0.a.weight"
ROWS, COLS = 24, 512


def raw_of(kind: str, seed: int = 1) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=(ROWS, COLS)).astype(np.float32)
    found = encoded(values, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(found)).view(torch.uint8).view(ROWS, -1)


def read(kind: str, raw: torch.Tensor):
    reader, name = GgufBlocks(), f"{NAME}.{kind}"
    return reader.read(NAME, reader.parts_of(NAME, {name}), {name: raw}.__getitem__)


def numbers(kind: str, raw: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KEPT)
def test_numbers_are_those_of_gguf(kind):
    raw = raw_of(kind)

    found = read(kind, raw)

    want = numbers(kind, raw)
    assert found.shape == want.shape == (ROWS, COLS)
    torch.testing.assert_close(found.numbers(), want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("kind", KEPT)
def test_parts_of_a_matrix_are_read_as_the_whole(kind, monkeypatch):
    raw = raw_of(kind)
    whole = read(kind, raw)

    monkeypatch.setattr(reading, "_PART_BYTES", 5 * raw.shape[1])  # 24 rows: four of 5, one of 4
    parts = read(kind, raw)

    assert (parts.code, parts.group) == (whole.code, whole.group)
    assert all(map(torch.equal, parts.tensors, whole.tensors))


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q4_K", "Q5_K"), ("Q5_1", "Q4_1")]
)
def test_matrices_of_two_kinds_are_joined(kinds):
    raws = [raw_of(kind, seed) for seed, kind in enumerate(kinds)]

    both = join([read(kind, raw) for kind, raw in zip(kinds, raws, strict=True)])

    want = torch.cat([numbers(kind, raw) for kind, raw in zip(kinds, raws, strict=True)])
    torch.testing.assert_close(both.numbers(), want, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("kinds", "kept"), [(("Q4_K", "Q6_K"), True), (("Q4_K", "Q8_0"), False)])
def test_joined_scales_stay_multiples_of_steps_if_all_are(kinds, kept):
    both = join([read(kind, raw_of(kind)) for kind in kinds])

    assert (both.step is not None) == kept
    assert both.scale.dtype == (torch.int8 if kept else torch.float32)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_columns_of_k_quants(kind):
    whole = read(kind, raw_of(kind))

    block, part = whole.columns(256, 512), whole.columns(64, 320)

    assert block.scale.dtype == torch.int8
    assert part.scale.dtype == torch.float32  # it cuts superblocks
    assert block.numbers().equal(whole.numbers()[:, 256:])
    assert part.numbers().equal(whole.numbers()[:, 64:320])


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 0), ("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208)])
def test_scales_that_are_no_numbers_are_named(kind, at):
    raw = raw_of(kind)
    raw[3, at : at + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)

    with pytest.raises(
        ConfigError, match=rf"scales of 'layers\.0\.a\.weight' \({kind}\) are not finite"
    ):
        read(kind, raw)


@pytest.mark.parametrize("kind", KEPT)
def test_loaded_matrices_take_the_planned_bits(kind):
    size, make = KEPT[kind]
    numbers, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    weight = make(torch.zeros(64, 2048 // numbers, size, dtype=torch.uint8))
    packed = pack(weight, torch.bfloat16)
    parts = (packed.data, packed.scale, packed.zeros, packed.shifts, packed.steps)

    assert sum(part.nbytes for part in parts if part is not None) * 8 == GGUF_BITS[kind] * 64 * 2048


@pytest.mark.parametrize("kind", KEPT)
def test_matrices_on_devices_take_the_planned_bits(kind):
    size, make = KEPT[kind]
    numbers, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    weight = make(torch.zeros(64, 2048 // numbers, size, dtype=torch.uint8)).for_devices()

    found = sum(part.nbytes for part in weight.tensors) * 8

    assert found == GGUF_DEVICE_BITS[kind] * 64 * 2048


def test_bits_are_planned_for_all_types_that_are_kept():
    assert GGUF_BITS.keys() == GGUF_DEVICE_BITS.keys() == KEPT.keys()


@pytest.mark.parametrize("kind", KEPT)
def test_a_last_part_may_be_one_row_of_one_block(kind, monkeypatch):
    size, _ = KEPT[kind]
    monkeypatch.setattr(reading, "_PART_BYTES", 4 * size)
    raw = torch.zeros(9, size, dtype=torch.uint8)

    assert read(kind, raw).shape[0] == 9
