"""MXFP4 experts of gpt-oss: what transformers reads, in their bits, and refused where broken."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.formats import Formats, choose
from sylvan.runtime.models.mxfp4 import unpack
from sylvan.runtime.models.registry import choose_path, family_of, load_config
from tests.parity.checkpoints import VOCAB, write
from tests.parity.families import FAMILIES
from tests.parity.serving import Serving

STACKS = ("gate_up_proj", "down_proj")


def test_every_byte_and_power():
    """Values by the definition of E2M1: sign, two bits of exponent raised by 1, one bit."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 4, 1, 1)
    scales = torch.tensor([1, 120, 127, 250], dtype=torch.uint8)[None, :, None].repeat(1, 1, 16)

    found = unpack(blocks, scales).view(4, 256, 2)

    for row, power in enumerate((1, 120, 127, 250)):
        for byte in range(256):
            for half, bits in enumerate((byte & 15, byte >> 4)):
                exponent, fraction = bits >> 1 & 3, bits & 1
                value = (1 + fraction / 2) * 2 ** (exponent - 1) if exponent else fraction / 2
                expected = math.ldexp(-value if bits & 8 else value, power - 127)
                assert found[row, byte, half].item() == expected


def test_as_transformers_reads_them():
    torch.manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)

    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)

    assert torch.equal(unpack(blocks, scales).transpose(1, 2), expected)


@pytest.fixture
def packed(tmp_path):
    """A checkpoint with packed experts, and one with what transformers unpacks of them."""
    config = FAMILIES["gpt-oss"]()
    config.intermediate_size = 96
    paths = tmp_path / "packed", tmp_path / "plain"
    for path in paths:
        write(config, 5, path)
    tensors = load_file(paths[0] / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(tensors, paths[0] / "model.safetensors")
    save_file(plain, paths[1] / "model.safetensors")
    raw = json.loads((paths[0] / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (paths[0] / "config.json").write_text(json.dumps(raw))
    return paths


def test_a_packed_checkpoint_is_served_natively_and_exactly(packed):
    prompt = np.random.default_rng(1).integers(4, VOCAB, 30).tolist()
    everything = LogprobOptions(token_ids=tuple(range(VOCAB)))
    found = []
    for path in packed:
        serving = Serving(path)
        rid = serving.add(prompt, logprobs=everything, max_new_tokens=8)
        serving.run()
        rows: list[np.ndarray] = []
        for out in serving.outputs[rid]:
            assert out.logprobs is not None
            assert out.logprobs.chosen_logprobs is not None
            rows.append(out.logprobs.chosen_logprobs)
        found.append((serving.tokens[rid], np.concatenate(rows)))

    assert choose_path(json.loads((packed[0] / "config.json").read_text())).config.path == "native"
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


def test_experts_stay_in_their_bits(packed):
    kept, plain = (loaded(packed[0], blocks=blocks) for blocks in (True, False))

    for ours, theirs in zip(kept.layers, plain.layers, strict=True):
        for name in STACKS:
            weight = getattr(ours.mlp.experts, name)
            assert str(weight.form) == "fp4_e2m1 codes in groups of 32"
            assert torch.equal(weight.numbers(), getattr(theirs.mlp.experts, name))
    config = load_config(packed[0])
    assert choose(config, None).blocks
    assert not choose(config, None, by="none").blocks


def loaded(path, *, blocks):
    config = load_config(path)
    model = family_of(config).model(config, Build(dtype=torch.float32, length=32))
    load_weights(model, path, formats=Formats(blocks=blocks))
    return model


@pytest.mark.parametrize("broken", ["missing", "shape", "infinite"])
def test_broken_blocks_are_named(packed, broken):
    file = packed[0] / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    if broken == "missing":
        del tensors[name]
    elif broken == "shape":
        tensors[name] = tensors[name][:, :, :1].contiguous()
    else:
        tensors[name] = torch.full_like(tensors[name], 255)
    save_file(tensors, file)

    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        Serving(packed[0])
