"""Programs on engines whose streams carry only what is new (`text.incremental_stream`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import sylvan as sgl
from sylvan.lang.backends.engine import EngineBackend
from tests.support.tiny import write_model

SERVE = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["http", "engine"])
def backend(request: pytest.FixtureRequest, model: Path) -> Iterator[object]:
    settings = {**SERVE, "text.incremental_stream": True}
    if request.param == "engine":
        engine = sgl.Engine(model_path=str(model), **settings)
        yield EngineBackend(engine)
        engine.shutdown()
        return
    with sgl.Runtime(model_path=str(model), launch_timeout=120, **settings) as runtime:
        yield runtime.endpoint


@sgl.function
def one(s, start, **how):
    s += start + sgl.gen("x", **how)


HOWS = [
    {"max_tokens": 40},
    {"max_tokens": 1},
    {"max_tokens": 60, "stop": ["a", "e"]},
    {"max_tokens": 30, "regex": "[a-z]{4} = (yes|no)"},  # with tokens that come at once
    {"max_tokens": 20, "return_logprob": True},
]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("start", ["Hello", "Once upon"])
def test_a_stream_brings_what_a_plain_run_brings(backend, start, how) -> None:
    plain = one.run(start, backend=backend, temperature=0, **how)
    stream = one.run(start, backend=backend, temperature=0, stream=True, **how)
    pieces = list(stream.text_iter("x"))

    assert stream.error() is None
    assert "".join(pieces) == plain["x"]
    assert stream["x"] == plain["x"]
    whole, parts = plain.get_meta_info("x"), stream.get_meta_info("x")
    key = "output_token_logprobs"
    assert [t for _, t, _ in parts.get(key, [])] == [t for _, t, _ in whole.get(key, [])]


def test_samples_of_one_stream_are_distinguished(backend) -> None:
    how = {"max_tokens": 12, "n": 3}
    plain = one.run("Hello", backend=backend, temperature=0, **how)
    stream = one.run("Hello", backend=backend, temperature=0, stream=True, **how)
    for _ in stream.text_iter():
        pass

    assert stream["x"] == plain["x"]
