"""Readers of quantised checkpoints give the numbers that the layouts say, or name what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats import stored_format
from tests.support.quantised import CASES, awq, fp8, gptq

NAME = "layers.0.a.weight"
STEM = NAME.removesuffix("weight")


def found(case: str, parts, name: str = NAME):
    reader = stored_format({"quantization_config": CASES[case][2]})
    there = {STEM + end: part for end, part in parts.items()}
    return reader.read(name, reader.parts_of(name, there), there.__getitem__)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(32, 128), (96, 384)])
def test_numbers_are_those_of_the_layout(case, shape):
    make, arguments, _ = CASES[case]
    stored = make(shape, 5, **arguments)

    weight = found(case, stored.parts)

    assert weight.shape == shape
    assert torch.equal(weight.numbers(), stored.numbers)


@pytest.mark.parametrize(("case", "ordered"), [("gptq", False), ("gptq-order-asym", True)])
def test_what_says_nothing_is_not_kept(case, ordered):
    make, arguments, _ = CASES[case]

    weight = found(case, make((32, 128), 5, **arguments).parts)

    assert (weight.order is not None) == ordered
    assert (weight.zero is not None) == ordered


def test_a_part_of_a_matrix_is_that_part_of_its_numbers():
    for case, columns in (("gptq", (64, 192)), ("fp8-rows", (2, 100)), ("awq", (128, 256))):
        make, arguments, _ = CASES[case]
        weight = found(case, make((32, 256), 5, **arguments).parts)

        assert torch.equal(weight[3:17].numbers(), weight.numbers()[3:17])
        assert torch.equal(weight.columns(*columns).numbers(), weight.numbers()[:, slice(*columns)])
        flat = weight.stacked(4)
        assert torch.equal(flat.numbers(), weight.numbers().unflatten(0, (4, 8)))
        assert torch.equal(flat.flat().numbers(), weight.numbers())


def broken(part: str, how):
    return lambda parts: {**parts, part: how(parts[part])}


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (
            "gptq",
            broken("scales", lambda x: x * float("nan")),
            r"scales 'layers\.0\.a\.scales'.*fin",
        ),
        ("gptq", broken("scales", lambda x: x[:1]), r"'layers\.0\.a\.scales' is \[1, 32\]"),
        ("gptq", broken("qweight", lambda x: x.long()), r"qweight' is .* of torch.int64"),
        ("gptq", broken("g_idx", lambda x: x * 0), r"g_idx' does not divide 128 inputs"),
        ("gptq", broken("qzeros", lambda x: x[:, :3]), r"qzeros' is .* no 4 bits of 32 outputs"),
        ("awq", broken("qzeros", lambda x: x[:, :3]), r"qzeros' .* which do not match"),
        ("awq", broken("scales", lambda x: x.int()), r"scales' are torch.int32"),
        ("fp8-block", broken("weight_scale_inv", lambda x: x[:, :0]), "blocks of 128 x 128"),
        ("fp8-block", broken("weight_scale_inv", lambda x: x / 0), "not finite"),
        (
            "fp8-rows",
            broken("weight", lambda x: (x.view(torch.uint8) | 127).view(torch.float8_e4m3fn)),
            r"weights of 'layers\.0\.a\.weight' are not finite",
        ),
        ("fp8-rows", broken("weight", lambda x: x.to(torch.float8_e5m2)), "float8_e5m2"),
        ("fp8-rows", broken("weight_scale", lambda x: x[:7]), r"\[7, 1\].*no blocks"),
    ],
)
def test_what_is_wrong_is_named(case, change, words):
    make, arguments, _ = CASES[case]
    parts = dict(make((32, 128), 5, **arguments).parts)

    with pytest.raises(ConfigError, match=words):
        found(case, change(parts))


@pytest.mark.parametrize("case", CASES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_a_tensor_of_another_size_or_type_never_passes(case, data):
    """It is named, or the matrix has another shape, which is refused, or the same numbers."""
    make, arguments, _ = CASES[case]
    stored = make((32, 128), 5, **arguments)
    parts = dict(stored.parts)
    name = data.draw(st.sampled_from(sorted(parts)))
    part = parts[name]
    if part.dim() and data.draw(st.booleans()):
        dim = data.draw(st.integers(0, part.dim() - 1))
        part = part.narrow(dim, 0, data.draw(st.integers(0, part.shape[dim] - 1)))
        assume(part.numel() != 1)  # one number is a scale of the whole matrix
    else:
        kinds = torch.int64, torch.uint8, torch.int8, torch.bool, torch.complex64
        part = part.float().to(data.draw(st.sampled_from([k for k in kinds if k != part.dtype])))

    message, weight = "", None
    try:
        weight = found(case, parts | {name: part})
    except ConfigError as error:
        message = str(error)

    if weight is None:
        assert "layers.0.a." in message
    elif weight.shape == (32, 128):
        assert torch.equal(weight.numbers(), stored.numbers), name


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "exl2"}, "quantised by 'exl2'"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 64}, r"\.bits is 5"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, r"\.group_size is 100"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "is 'gemv'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, r"\.bits is 8"),
        ({"quant_method": "fp8", "weight_block_size": [100, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"\.fmt is 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "x"},
            "packing_format is 'x'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
                "config_groups": {"group_0": {}},
            },
            "sparse-24-bitmask",
        ),
    ],
)
def test_unknown_settings_are_named(said, words):
    with pytest.raises(ConfigError, match=words):
        stored_format({"quantization_config": said})


def test_biases_of_zeros_are_passed_over():
    reader = stored_format({"quantization_config": CASES["gptq"][2]})

    assert reader.idle("layers.0.a.bias", lambda name: torch.zeros(4))
    assert not reader.idle("layers.0.a.bias", lambda name: torch.ones(4))


def test_matrices_of_one_kind_are_joined():
    from sylvan.kernels.matmul.weights import join

    first = found("gptq", gptq((32, 128), 1).parts)
    second = found("gptq", gptq((64, 128), 2, symmetric=False).parts)

    both = join([first, second])
    assert torch.equal(both.numbers(), torch.cat([first.numbers(), second.numbers()]))
    finer = found("awq", awq((32, 128), 1, group=32).parts)
    assert torch.equal(
        join([first, finer]).numbers(), torch.cat([first.numbers(), finer.numbers()])
    )
    for other in (
        found("fp8-rows", fp8((32, 128), 1, rows=True).parts),
        replace(first, order=torch.arange(128).int()),
    ):
        with pytest.raises(ValueError, match="different"):
            join([first, other])
