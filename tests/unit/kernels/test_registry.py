"""Kernels by what they need: the table against files, other packages, shapes and chips."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import sylvan.kernels
from sylvan.kernels import describe
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.inventory import op_uses
from sylvan.kernels.norm import reference
from sylvan.kernels.registry import OWN, KernelRegistry, KernelSpec, load
from sylvan.protocol.errors import ConfigError

ROOT = Path(sylvan.kernels.__file__).parent
HERE = __name__


def doubled(x, weight, eps, residual, offset):
    """Not what the reference computes, so that it shows who did."""
    return 2 * x, x


def short(x, *args):
    """Takes rows of up to 8 columns."""
    return x.shape[-1] <= 8


def spec(**more) -> KernelSpec:
    given = {"op": "norm.rms_norm", "backend": "mine", "device": "cpu", "target": f"{HERE}:doubled"}
    return KernelSpec(**given | more)


ONE = spec()
TWO = (spec(takes=f"{HERE}:short"), spec(op="rows.add", package="no_such_package"))
NONE = (1, 2)


def others(name: str) -> KernelRegistry:
    return KernelRegistry([EntryPoint(name, f"{HERE}:{name}", "sylvan.kernels")])


def norm(x: torch.Tensor, kernels: KernelRegistry) -> torch.Tensor:
    dispatch = KernelDispatch("norm.rms_norm", reference.rms_norm, kernels)
    return dispatch.on(x)(x, torch.ones(x.shape[-1]), 1e-6, None, 0.0)[0]


def test_the_table_has_every_kernel_there_is():
    native = {path.parent.name for path in ROOT.glob("*/*.cpp")} - {"native", "ngram"}
    triton = {path.parent.name for path in ROOT.glob("*/triton_*.py")} - {"gpu"}

    assert {s.folder for s in OWN if s.backend == "native"} == native
    assert {s.folder for s in OWN if s.backend == "triton"} == triton


def test_targets_are_functions_of_the_files():
    for own in OWN:
        module, _, name = own.target.partition(":")
        if module:
            path = ROOT.parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
            assert re.search(rf"^def {name}\(" if name else "^def ", path.read_text(), re.M)


def test_kernels_of_another_package_come_first():
    x = torch.ones(2, 4)

    assert torch.equal(norm(x, others("ONE")), 2 * x)
    assert not torch.equal(norm(x, KernelRegistry([])), 2 * x)


def test_what_a_kernel_does_not_take_the_reference_computes():
    few, many = torch.ones(2, 8), torch.ones(2, 16)

    assert torch.equal(norm(few, others("TWO")), 2 * few)
    assert torch.equal(norm(many, others("TWO")), norm(many, KernelRegistry([])))


def test_types_and_chips_are_asked():
    narrow = spec(dtypes=frozenset({"bfloat16"}), chips=("sm_9", "sm_10"), device="cuda")

    assert narrow.fits("cuda", "bfloat16", "sm_90")
    assert not narrow.fits("cuda", "float16", "sm_90")
    assert not narrow.fits("cuda", "bfloat16", "sm_80")
    assert not narrow.fits("cpu", "bfloat16", "sm_90")


def test_a_kernel_without_its_package_is_not_used_and_says_so():
    kernels = others("TWO")

    assert [s.backend for s in kernels.usable("rows", "cpu")] == ["native"]
    assert kernels.of("rows.add", "cpu")[0].unusable_reason() == "no_such_package is not installed"


def test_check_kernels_names_them():
    found = {use.name: use.detail for use in op_uses(describe(), {}, others("ONE"))}

    assert found["norm"].startswith("cpu: mine for norm.rms_norm, else ")
    assert "mine" not in found["rows"]


def test_what_is_no_kernel_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"the entry point 'NONE' .* must be a KernelSpec"):
        others("NONE")
    with pytest.raises(ConfigError, match="the kernels 'gone' cannot be loaded from"):
        others("gone")


def test_a_target_may_be_a_module():
    assert load("sylvan.kernels.norm.reference") is reference
