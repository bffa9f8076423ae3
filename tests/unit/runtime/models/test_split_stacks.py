"""Tensors that hold many matrices look like one tensor each."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.split_stacks import SplitStacks


def parts_of(name):
    return tuple(f"{name}.{number}" for number in range(3)) if name != "plain" else ()


def test_rows_and_stacks_are_divided(tmp_path):
    rows, stack = torch.randn(6, 4), torch.randn(3, 5, 2)
    save_file({"rows": rows, "stack": stack, "plain": rows[:2].clone()}, tmp_path / "m.safetensors")

    files = SplitStacks(Checkpoint(tmp_path), parts_of)

    names = {"plain", *parts_of("rows"), *parts_of("stack")}
    assert set(files.tensors) == names
    for number in range(3):
        assert files.tensor(f"rows.{number}").equal(rows[2 * number : 2 * number + 2])
        assert files.tensor(f"stack.{number}").equal(stack[number])
        assert files.tensors[f"stack.{number}"].shape == (5, 2)
    assert files.tensor("plain").equal(rows[:2])
    sizes = sum(stored.stop - stored.start for stored in files.tensors.values())
    assert sizes == files.num_bytes


def test_what_does_not_divide_is_refused(tmp_path):
    save_file({"rows": torch.randn(5, 4)}, tmp_path / "m.safetensors")

    with pytest.raises(ConfigError, match="does not divide into 3"):
        SplitStacks(Checkpoint(tmp_path), parts_of)
