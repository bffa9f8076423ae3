"""Constrained outputs on a late device: the ids are looked at while the next pass is under way."""

from __future__ import annotations

import pytest

from sylvan.runtime.executor.build import build_executor
from tests.parity.serving import Serving
from tests.support.delayed import DelayedPlatform
from tests.support.random_model import write_random_model
from tests.support.rhymes import Rhymes, constrained

PROMPTS = [[5, 9, 200, 31], [7] * 17, list(range(40, 60))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


def serve(model_dir, platform=None, *, overlap=False):
    rhymes = Rhymes()

    def build(path, options):
        return build_executor(path, options, parts=constrained(rhymes), platform=platform)

    options = {"attention": "dense", "runner": "graph"} if platform else {}
    return rhymes, Serving(model_dir, overlap=overlap, build=build, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_constraints_see_the_same_tokens_as_on_the_cpu(model_dir, overlap):
    _, plain = serve(model_dir)
    platform = DelayedPlatform()
    rhymes, serving = serve(model_dir, platform, overlap=overlap)
    seen = set()
    for way in ({}, {"temperature": 1.1}, {"frequency_penalty": 1.0, "temperature": 1.5}):
        asked = way | {"max_new_tokens": 30}
        found = serving.generate(PROMPTS, **asked)

        assert found == plain.generate(PROMPTS, **asked)
        seen |= rhymes.kinds

    assert platform.replayed > 20
    assert {"certain", "replaced"} <= seen
    assert ("void" in seen) == overlap
