"""Every family on a real GPU gives what transformers gives; run with `--device cuda`."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import transformers

from sylvan.runtime.platform.find import load_kinds, open_platform
from tests.parity import test_quantised, vectors
from tests.parity.checkpoints import VOCAB, write
from tests.parity.compare import EVERYTHING, compare
from tests.parity.families import FAMILIES
from tests.parity.serving import Serving, build_standard
from tests.support.adapters import AdapterServing, write_random_adapter
from tests.support.chosen import device_name
from tests.support.oracle_drafter import OracleDrafter
from tests.support.quantised import CASES, TOOLS
from tests.support.random_model import write_random_model

pytestmark = pytest.mark.gpu

NEW = 24


@pytest.fixture(scope="module")
def gpu():
    return open_platform(load_kinds(())[device_name()])


@pytest.fixture(scope="module")
def there(gpu) -> dict:
    """Arguments of a `Serving` that put its model on the GPU."""
    return {
        "options": {"device": gpu.facts.name},
        "build": partial(build_standard, platform=gpu),
        "platform": gpu,
    }


@pytest.fixture(scope="module")
def serve(there):
    return partial(Serving, **there)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=256)


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


@pytest.mark.parametrize("name", vectors.VECTORS)
def test_vectors_equal_those_of_transformers(name, tmp_path, there):
    try:
        vectors.VECTORS[name]()
    except AttributeError as unknown:
        pytest.skip(f"transformers {transformers.__version__}: {unknown}")

    def serve(path, pooling, **limits):
        return vectors.serve(path, pooling, **limits, **there)

    found = vectors.compare_vectors(name, tmp_path, serve)

    assert found.unequal == []
    assert found.cosine >= vectors.COSINE
    assert found.largest < 1e-4


def test_adapters_answer_as_on_the_cpu(model_dir, tmp_path, there):
    folders = {
        name: write_random_adapter(tmp_path / name, model_dir, seed, r=seed + 3)
        for seed, name in enumerate(("first", "second"))
    }
    prompts = [list(range(5, 42)), [9, 8, 7]]
    found = []
    for place in ({}, there):
        serving = AdapterServing(model_dir, folders, **place)
        asked = [
            serving.ask(prompt, name, logprobs=EVERYTHING, max_new_tokens=12)
            for prompt in prompts
            for name in (None, *folders)
        ]
        serving.run()
        outputs = [serving.outputs[rid] for rid in asked]
        logprobs = [np.concatenate([o.logprobs.chosen_logprobs for o in out]) for out in outputs]
        found.append(([serving.tokens[rid] for rid in asked], np.stack(logprobs)))

    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-4)
    assert len({tuple(tokens) for tokens in found[0][0]}) == len(found[0][0])


def test_drafts_change_nothing(model_dir, serve):
    prompts = [list(range(5, 42)), [9, 8, 7], [4] * 20]
    plain = serve(model_dir, runner="auto")
    expected = plain.generate(prompts, max_new_tokens=NEW)
    answers = {tuple(p): tokens for p, tokens in zip(prompts, expected, strict=True)}
    drafter = OracleDrafter(answers, VOCAB, right=0.7)

    drafted = serve(model_dir, runner="auto", capabilities=(drafter,))

    assert drafted.generate(prompts, max_new_tokens=NEW) == expected
    assert drafter.drafted > NEW
