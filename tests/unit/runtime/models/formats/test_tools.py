"""Checkpoints of bitsandbytes, HQQ, torchao, Quark and in MXFP8, by their published layouts."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import read_config
from sylvan.runtime.models.formats import REFUSED, stored_format
from tests.support.make_format_samples import FOLDER
from tests.support.quantised import CASES, TOOLS, bitsandbytes4, mlx, torchao_int

NAME = "layers.0.a.weight"
STEM = NAME.removesuffix("weight")
ONE_SCALE = "torchao-int8", "torchao-fp8"
"""A scale of all rows is the scale of the first row alone, so that a cut tensor is not seen."""


def found(case: str, parts):
    reader = stored_format({"quantization_config": TOOLS[case][2]})
    there = {STEM + end: part for end, part in parts.items()}
    return reader.read(NAME, reader.parts_of(NAME, there), there.__getitem__)


def close(weight, numbers) -> bool:
    return torch.allclose(weight.numbers(), numbers, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", TOOLS)
@pytest.mark.parametrize("shape", [(32, 128), (96, 384)])
def test_numbers_are_those_of_the_layout(case, shape):
    make, arguments, _ = TOOLS[case]
    stored = make(shape, 5, **arguments)

    weight = found(case, stored.parts)

    assert weight.shape == shape
    assert close(weight, stored.numbers)


@pytest.mark.parametrize("case", TOOLS)
def test_tensors_beside_the_matrix_are_known(case):
    make, arguments, said = TOOLS[case]
    parts = {STEM + end: part for end, part in make((32, 128), 5, **arguments).parts.items()}
    reader = stored_format({"quantization_config": said})

    rest = parts.keys() - set(reader.parts_of(NAME, parts))

    assert all(reader.idle(name, parts.__getitem__) for name in rest)
    assert str(reader.bits) in ("4", "8", "3")
    assert not reader.idle(STEM + "bias", lambda name: torch.ones(4))


def test_blocks_that_rows_do_not_divide_are_read_in_smaller_ones():
    stored = bitsandbytes4((32, 96), 1)

    weight = found("bnb-nf4", stored.parts)

    assert weight.group == 32
    assert close(weight, stored.numbers)


def test_codes_stored_in_another_type_are_the_same():
    stored = bitsandbytes4((32, 128), 1)
    parts = {**stored.parts, "weight": stored.parts["weight"].view(-1, 2).view(torch.bfloat16)}

    assert close(found("bnb-nf4", parts), stored.numbers)


def test_eight_bits_of_torchao_stay_eight():
    stored = torchao_int((32, 128), 1, bits=8, group=32)

    weight = found("torchao-intx", stored.parts)

    assert weight.code == "int8"
    assert close(weight, stored.numbers)


def broken(part: str, how):
    return lambda parts: {**parts, part: how(parts[part])}


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("bnb-nf4", broken("weight.absmax", lambda x: x[:7]), r"absmax' has 7 blocks of 64"),
        ("bnb-nf4", broken("weight.absmax", lambda x: x / 0), r"absmax' are not finite"),
        ("bnb-nf4", broken("weight", lambda x: x[:9]), r"weight' has 9 bytes"),
        ("bnb-nf4", broken("weight.quant_map", lambda x: x * 2), "are not those of NF4"),
        (
            "bnb-nf4",
            broken("weight.quant_state.bitsandbytes__nf4", lambda x: x[:9]),
            r"bitsandbytes__nf4' is not a state of a quantised matrix",
        ),
        (
            "bnb-nf4-double",
            broken("weight.nested_quant_map", lambda x: x[:8]),
            r"nested_quant_map' 8, for 64 magnitudes",
        ),
        ("bnb-int8", broken("SCB", lambda x: x[:8]), r"with 8 in 'layers\.0\.a\.SCB'"),
        ("hqq-4", broken("W_q", lambda x: x[:3]), r"W_q' is \[3, 64\] of torch.uint8"),
        ("hqq-4", broken("zero", lambda x: x[:3]), "64 scales and 3 zero points"),
        ("hqq-4", broken("scale", lambda x: x / 0), "not finite"),
        ("hqq-4", broken("shape", lambda x: x.float()), r"shape' is \[2\] of torch.float32"),
        ("torchao-intx", broken("_weight_qdata", lambda x: x.int()), "specific to one kernel"),
        (
            "torchao-intx",
            broken("_weight_scale", lambda x: x[:, :1]),
            r"_weight_zero_point' is \[32, 2\]",
        ),
        ("torchao-int4", broken("_weight_scale", lambda x: x / 0), "not finite"),
        ("quark-mxfp4", broken("weight_scale", lambda x: x | 255), "not finite"),
        ("quark-mxfp4", broken("weight_scale", lambda x: x[:, :1]), "16 bytes for each scale"),
        ("mxfp8", broken("weight_scale_inv", lambda x: x[:, :1]), "a scale for 32 inputs"),
        ("mxfp8", broken("weight", lambda x: x.to(torch.float8_e5m2)), "float8_e5m2"),
    ],
)
def test_what_is_wrong_is_named(case, change, words):
    make, arguments, _ = TOOLS[case]
    parts = dict(make((32, 128), 5, **arguments).parts)

    with pytest.raises(ConfigError, match=words):
        found(case, change(parts))


@pytest.mark.parametrize("case", [case for case in TOOLS if case not in ONE_SCALE])
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_a_tensor_of_another_size_or_type_never_passes(case, data):
    """It is named, or the matrix has another shape, which is refused, or the same numbers."""
    make, arguments, _ = TOOLS[case]
    stored = make((32, 128), 5, **arguments)
    parts = dict(stored.parts)
    name = data.draw(st.sampled_from(sorted(parts)))
    part = parts[name]
    if part.dim() and data.draw(st.booleans()):
        dim = data.draw(st.integers(0, part.dim() - 1))
        part = part.narrow(dim, 0, data.draw(st.integers(0, part.shape[dim] - 1)))
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
        assert close(weight, stored.numbers), name


@pytest.mark.parametrize("method", REFUSED)
def test_methods_without_a_reader_are_refused_by_name(method):
    with pytest.raises(ConfigError, match=f"quantised by '{method}', .*not supported \\("):
        stored_format({"quantization_config": {"quant_method": method}})


HQQ = {"nbits": 4, "group_size": 64, "axis": 1}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf3",
            },
            "bnb_4bit_quant_type is 'nf3'",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "is 'int4_weight_only'"),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": HQQ | {"axis": 0}}},
            r"quant_config\.axis is 0",
        ),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": HQQ | {"nbits": 7}}},
            r"nbits is 7",
        ),
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": HQQ, "zero_quant_params": {"nbits": 8}},
            },
            "zero_quant_params is set",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": FP4 | {"group_size": 16}}},
            "global_quant_config.weight is 'fp4' 'per_group'",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": FP4},
                "export": {"weight_format": "fake_quantized"},
            },
            "weight_format is 'fake_quantized'",
        ),
        ({"quant_method": "quark"}, "says nothing of weights"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 16]}, "groups of 32"),
        ({"quant_method": "modelopt"}, "quant_algo is None"),
        ({"quant_method": "mlx", "bits": 5, "group_size": 64}, r"quantization\.bits is 5"),
        (
            {"quant_method": "mlx", "bits": 4, "group_size": 64, "a": {"mode": "mxfp4"}},
            r"quantization\.a\.mode is 'mxfp4'",
        ),
        ({"quant_method": "blockwise_int8", "weight_block_size": [7, 1]}, "weight_block_size is"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}},
            },
            "quant_algo is 'W4A8_AWQ'",
        ),
    ],
)
def test_unknown_settings_are_named(said, words):
    with pytest.raises(ConfigError, match=words):
        stored_format({"quantization_config": said})


def test_what_mlx_says_is_that_of_the_model(tmp_path):
    said = {"group_size": 64, "bits": 4, "model.layers.0.a": {"group_size": 32, "bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": said}))
    reader = stored_format(read_config(tmp_path))
    assert (reader.name, reader.bits) == ("MLX, 4 bits in groups of 64", 4)
    stored = mlx((32, 128), 5, bits=8, group=32)
    parts = {STEM + end: part for end, part in stored.parts.items()}

    weight = reader.read(NAME, reader.parts_of(NAME, parts), parts.__getitem__)

    assert close(weight, stored.numbers)


def test_a_config_of_a_file_of_its_own_is_that_of_the_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')

    assert stored_format(read_config(tmp_path)).name == "ModelOpt FP8 (e4m3)"
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 3}')
    with pytest.raises(ConfigError, match="quantization must be an object"):
        read_config(tmp_path)


SAMPLES = sorted(FOLDER.glob("*.safetensors"))


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_a_matrix_is_what_its_tool_takes_it_for(file):
    """Files that the tools wrote: see `make_format_samples`."""
    with safe_open(file, "pt") as opened:
        said = json.loads(opened.metadata()["config"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    numbers = tensors.pop("numbers")
    reader = stored_format({"quantization_config": said})
    parts = reader.parts_of("a.weight", tensors)

    weight = reader.read("a.weight", parts, tensors.__getitem__)

    assert weight.shape == numbers.shape
    of_tool = weight.numbers()
    # NF4's numbers are rounded to bfloat16 here, and NVFP4's by compressed-tensors; tools round
    # their results to their own types
    limit = 2**-8 if file.stem.startswith(("bnb-nf4", "llmcompressor-nvfp4")) else 2**-10
    torch.testing.assert_close(of_tool, numbers, rtol=limit, atol=1e-4)
    rest = tensors.keys() - set(parts)
    assert all(reader.idle(name, tensors.__getitem__) for name in rest)


def test_every_tool_wrote_samples():
    tools = {file.stem.partition("-")[0] for file in SAMPLES}
    others = {"autoawq", "autoround", "gptqmodel", "llmcompressor", "mlx", "modelopt", "quark"}
    assert tools == {"bnb", "hqq", "torchao", *others}


@pytest.mark.parametrize("case", CASES | TOOLS)
def test_scales_that_are_no_numbers_are_named(case):
    """Each tensor of floats that a matrix is read from, one by one."""
    make, arguments, said = (CASES | TOOLS)[case]
    stored = make((32, 128), 5, **arguments)
    reader = stored_format({"quantization_config": said})
    there = {STEM + end: part for end, part in stored.parts.items()}
    parts = reader.parts_of(NAME, there)
    floats = [n for n in parts if there[n].is_floating_point() and there[n].element_size() > 1]

    for name in floats:
        broken = there | {name: torch.full_like(there[name], float("nan"))}
        with pytest.raises(ConfigError, match=STEM.replace(".", r"\.")):
            reader.read(NAME, parts, broken.__getitem__)
    assert floats or case in ("quark-mxfp4", "modelopt-mxfp8", "mxfp8")  # scales are exponents


@pytest.mark.parametrize("case", CASES | TOOLS)
def test_a_missing_tensor_never_gives_other_numbers(case):
    """Without a tensor a matrix is named, is none of the format, or is the same."""
    make, arguments, said = (CASES | TOOLS)[case]
    stored = make((32, 128), 5, **arguments)
    reader = stored_format({"quantization_config": said})
    there = {STEM + end: part for end, part in stored.parts.items()}
    for name in reader.parts_of(NAME, there):
        rest = {key: part for key, part in there.items() if key != name}
        parts = reader.parts_of(NAME, rest)
        if parts == (NAME,) or not rest.keys() >= set(parts):
            continue  # missed while loading, by the name of a tensor
        message, weight = "", None
        try:
            weight = reader.read(NAME, parts, rest.__getitem__)
        except ConfigError as error:
            message = str(error)
        assert STEM in message or (weight is not None and close(weight, stored.numbers)), name
