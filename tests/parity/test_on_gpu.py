"""Every family on a real GPU gives what transformers gives; run with `--device cuda`."""

from __future__ import annotations

from functools import partial

import pytest
import transformers

from sylvan.runtime.platform.find import load_kinds, open_platform
from tests.parity import test_quantised
from tests.parity.checkpoints import write
from tests.parity.compare import compare
from tests.parity.families import FAMILIES
from tests.parity.serving import Serving, build_standard
from tests.support.chosen import device_name
from tests.support.quantised import CASES, TOOLS

pytestmark = pytest.mark.gpu

NEW = 24


@pytest.fixture(scope="module")
def serve():
    gpu = open_platform(load_kinds(())[device_name()])
    build = partial(build_standard, platform=gpu)
    return partial(Serving, options={"device": gpu.facts.name}, build=build)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers(family, tmp_path, serve):
    try:
        config = FAMILIES[family]()
    except AttributeError as unknown:
        pytest.skip(f"transformers {transformers.__version__}: {unknown}")
    model = write(config, len(family), tmp_path)

    found = compare(tmp_path, model, new=NEW, serve=serve)

    assert not found.modes
    assert found.excess <= 1


@pytest.mark.parametrize("case", [*CASES, *TOOLS])
def test_quantised_answers_are_those_of_the_numbers(tmp_path, case, serve):
    model = test_quantised.written(tmp_path / "model", "llama", case)

    found = compare(tmp_path / "model", model, new=NEW, serve=serve)

    assert not found.modes
    assert found.excess <= 1


@pytest.mark.parametrize(("family", "case"), [("qwen3-moe", "gptq"), ("deepseek-v3", "fp8-block")])
def test_quantised_experts_are_those_of_the_numbers(tmp_path, family, case, serve):
    model = test_quantised.written(tmp_path / "model", family, case)

    found = compare(tmp_path / "model", model, new=NEW, serve=serve)

    assert not found.modes
    assert found.excess <= 1
