"""Files by compressed-tensors are read as by compressed-tensors itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.kernels.matmul.weights import CodedWeight, Int4Weight, Int8Weight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats import stored_format

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

N, K = 48, 256
NAME = "layers.0.a.weight"


def compressed(layout, weights, scale, zero=None, rows=None, **more):
    """The reader's result for the tool's tensors, and the numbers that the tool takes them for."""
    reader, there, numbers = written(layout, weights, scale, zero, rows, **more)
    return reader.read(NAME, reader.parts_of(NAME, there), there.__getitem__), numbers


def written(layout, weights, scale, zero=None, rows=None, **more):
    """The reader, tensors by name, and the numbers that the tool takes them for."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=rows, format=layout
    )
    tool = BaseCompressor.load_from_registry(layout)
    state = {
        "weight": weight,
        "weight_scale": scale(weight),
        **{k: v(weight) for k, v in more.items()},
    }
    if zero is not None:
        state["weight_zero_point"] = zero
    made = tool.compress(state, scheme)
    numbers = tool.decompress(dict(made), scheme)["weight"]
    settings = {"config_groups": {"group_0": scheme.model_dump(mode="json")}, "format": layout}
    reader = stored_format(
        {"quantization_config": {"quant_method": "compressed-tensors"} | settings}
    )
    there = {NAME.removesuffix("weight") + end: part for end, part in made.items()}
    return reader, there, numbers


def by_group(group, dtype=torch.float16, most=7.0):
    return lambda w: (w.view(N, -1, group).abs().amax(-1) / most).to(dtype)


def blocks(w):
    return w.view(N // 16, 16, K // 64, 64).abs().amax((1, 3)) / 448


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("strategy", "group"), [("group", 32), ("group", 128), ("channel", None)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers(bits, strategy, group, symmetric):
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group}
    size = (N, K // (group or K))
    most = min(8, 1 << bits - 1)
    generator = torch.Generator().manual_seed(2)
    zero = torch.randint(-most, most, size, dtype=torch.int8, generator=generator)
    found, numbers = compressed(
        "pack-quantized",
        weights | {"symmetric": symmetric},
        by_group(group or K, most=2.0 ** (bits - 1)),
        None if symmetric else zero,
    )

    assert isinstance(found, CodedWeight)
    assert found.code == ("int4" if bits <= 4 else "int8")
    assert torch.equal(found.numbers().half(), numbers)


@pytest.mark.parametrize(
    ("bits", "kind"),
    [(8, Int8Weight), (6, Int8Weight), (4, Int4Weight), (3, Int4Weight), (2, Int4Weight)],
)
def test_schemes_that_round_rows_multiply_so(bits, kind):
    rows = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    strategy = {"strategy": "channel"} if bits > 4 else {"strategy": "group", "group_size": 64}
    found, numbers = compressed(
        "int-quantized" if bits == 8 else "pack-quantized",
        {"num_bits": bits, "type": "int", "symmetric": True} | strategy,
        by_group(K if bits > 4 else 64, torch.float32, most=2.0 ** (bits - 1)),
        rows=rows,
    )

    assert isinstance(found, kind)
    assert torch.equal(found.numbers(), numbers)


@pytest.mark.parametrize(
    ("strategy", "scale"),
    [
        ("channel", lambda w: w.abs().amax(1, keepdim=True) / 448),
        ("tensor", lambda w: w.abs().max().reshape(1) / 448),
        ("block", blocks),
    ],
)
def test_fp8(strategy, scale):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    weights |= {"block_structure": [16, 64]} if strategy == "block" else {}
    found, numbers = compressed("float-quantized", weights, scale)

    assert torch.equal(found.numbers(), numbers.float())


def test_mxfp4():
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    found, numbers = compressed(
        "mxfp4-pack-quantized",
        weights | {"symmetric": True, "scale_dtype": torch.uint8},
        lambda w: by_group(32, torch.float32, 4.0)(w).log2().floor().exp2(),
    )

    assert torch.equal(found.numbers(), numbers.float())


def test_nvfp4():
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    found, numbers = compressed(
        "nvfp4-pack-quantized",
        weights | {"symmetric": True, "scale_dtype": torch.float8_e4m3fn},
        lambda w: by_group(16, torch.float32, 6.0)(w) * 448,
        weight_global_scale=lambda w: torch.tensor([448.0]),
    )

    assert torch.allclose(found.numbers(), numbers.float(), rtol=2**-7, atol=0)


_INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
SCHEMES = {
    "int4": ("pack-quantized", _INT | {"symmetric": True}, by_group(32)),
    "int4 with zeros": (
        "pack-quantized",
        _INT | {"symmetric": False},
        by_group(32),
        torch.ones(N, K // 32, dtype=torch.int8),
    ),
    "fp8 rows": (
        "float-quantized",
        _FLOAT | {"strategy": "channel"},
        lambda w: w.abs().amax(1, keepdim=True) / 448,
    ),
    "fp8 blocks": (
        "float-quantized",
        _FLOAT | {"strategy": "block", "block_structure": [16, 64]},
        blocks,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        _NVFP4 | {"symmetric": True, "scale_dtype": torch.float8_e4m3fn},
        lambda w: by_group(16, torch.float32, 6.0)(w) * 448,
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_a_tensor_of_another_size_or_type_never_passes(scheme, data):
    """It is named, or the matrix has another shape, which is refused, or the same numbers."""
    more = {"weight_global_scale": lambda w: torch.tensor([448.0])} if scheme == "nvfp4" else {}
    reader, there, _ = written(*SCHEMES[scheme], **more)
    numbers = reader.read(NAME, reader.parts_of(NAME, there), there.__getitem__).numbers()
    name = data.draw(st.sampled_from(sorted(there)))
    part, kind = there[name], data.draw(st.sampled_from(["shorter", "type", "missing", "nan"]))
    if kind == "shorter" and part.dim() and part.numel() > 1:
        dim = data.draw(st.integers(0, part.dim() - 1))
        size = data.draw(st.integers(0, part.shape[dim] - 1))
        part = part.narrow(dim, 0, size)
    elif kind == "type":
        kinds = torch.int64, torch.int16, torch.bool, torch.complex64
        kinds = [k for k in kinds if k != part.dtype]
        part = part.float().to(data.draw(st.sampled_from(kinds)))
    elif kind == "nan" and part.is_floating_point():
        part = torch.full_like(part.float(), float("nan")).to(part.dtype)
    there = (
        {key: x for key, x in there.items() if key != name}
        if kind == "missing"
        else there | {name: part}
    )

    parts = reader.parts_of(NAME, there)
    if parts == (NAME,) or not there.keys() >= set(parts):
        return  # a matrix of plain numbers, which no 8-bit ones are, or a tensor that is missed
    message, weight = "", None
    try:
        weight = reader.read(NAME, parts, there.__getitem__)
    except ConfigError as error:
        message = str(error)

    if weight is None:
        assert "layers.0.a." in message
    elif weight.shape == (N, K):
        assert torch.equal(weight.numbers(), numbers), name
