"""Weight updates of a running server whose checkpoint another tool has quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sylvan.protocol.commands import DiskTensors, HashWeights, UpdateWeights
from tests.parity.serving import Serving
from tests.support.quantised_models import write_plain_model, write_quantised_model
from tests.support.updates import PROMPTS, carry_out, weights_in

CASES = "gptq-order-asym", "fp8-block", "bnb-nf4"


def write_other(source: Path, folder: Path) -> Path:
    """The same model and format with other numbers: matrices are those of the next layer."""
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    first, second = "layers.0.", "layers.1."
    turned = str.maketrans({"0": "1", "1": "0"})
    weights = {
        name.replace(part, part.translate(turned)): tensor
        for name, tensor in weights_in(source).items()
        for part in (first if first in name else second,)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_replaced_in_their_format(tmp_path: Path, case: str) -> None:
    old = write_quantised_model(tmp_path / "old", case)
    new = write_other(old, tmp_path / "new")
    serving, fresh = (Serving(path, runner="auto") for path in (old, new))
    before, wanted = serving.generate(PROMPTS), fresh.generate(PROMPTS)
    assert before != wanted

    [result] = carry_out(serving, UpdateWeights(DiskTensors(str(new)), partial=False))

    assert not result.error
    assert serving.generate(PROMPTS) == wanted
    assert carry_out(serving, HashWeights())[0].body == carry_out(fresh, HashWeights())[0].body


def test_numbers_of_another_format_change_nothing(tmp_path: Path) -> None:
    serving = Serving(write_quantised_model(tmp_path / "old", "fp8-block"), runner="auto")
    plain = write_plain_model(tmp_path / "plain")
    before = carry_out(serving, HashWeights())[0].body

    [result] = carry_out(serving, UpdateWeights(DiskTensors(str(plain)), partial=False))

    assert result.status == 400
    assert "layers.0." in result.error
    assert carry_out(serving, HashWeights())[0].body == before


def test_scales_that_are_no_numbers_change_nothing(tmp_path: Path) -> None:
    old = write_quantised_model(tmp_path / "old", "fp8-block")
    new = write_other(old, tmp_path / "new")
    weights = weights_in(new)
    name = next(name for name in weights if name.endswith("1.mlp.down_proj.weight_scale_inv"))
    weights[name] = torch.full_like(weights[name], torch.nan)
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    serving = Serving(old, runner="auto")
    before = carry_out(serving, HashWeights())[0].body

    [result] = carry_out(serving, UpdateWeights(DiskTensors(str(new)), partial=False))

    assert result.status == 400
    assert name.removeprefix("model.") in result.error
    assert carry_out(serving, HashWeights())[0].body == before
