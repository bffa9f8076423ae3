"""A diffusion model, served whole: blocks are streamed as they are complete."""

from __future__ import annotations

import pytest

from sylvan import Engine
from sylvan.protocol.errors import ConfigError, RequestError
from tests.parity.checkpoints import save_tokenizer
from tests.parity.published_blocks import filling, written
from tests.support.random_model import write_random_model

FLAGS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 4096}
NEW = 15
PROMPT = [5, 9, 20, 31, 7, 8]
PARAMS = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An engine, and what the published schedule writes with some settings."""
    folder = tmp_path_factory.mktemp("blocks")
    model = filling("sdar", folder)
    save_tokenizer(folder)
    with Engine(model_path=str(folder), processes="one", **FLAGS) as engine:
        yield engine, lambda **how: written(model, PROMPT, NEW, **how)[0]


def test_blocks_are_streamed(served):
    engine, published = served
    expected = published(steps=4, confidence=0.95)

    whole = engine.generate(input_ids=PROMPT, sampling_params=PARAMS)
    parts = [len(r["output_ids"]) for r in engine.generate(None, PARAMS, PROMPT, stream=True)]

    assert whole["output_ids"] == expected
    assert whole["meta_info"]["completion_tokens"] == NEW
    assert parts[-1] == NEW
    assert {(len(PROMPT) + part) % 4 for part in parts[:-1]} <= {0}


def test_requests_choose_their_schedule(served):
    engine, published = served

    one_pass = engine.generate(None, PARAMS, PROMPT, denoising_steps=1, confidence=1.0)

    assert one_pass["output_ids"] == published(steps=1, confidence=1.0)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [({"regex": "w5( w5)*"}, "grammar"), ({"repetition_penalty": 1.5}, "repeti")],
)
def test_what_needs_an_order_is_refused_by_name(served, sampling, param):
    engine, _ = served

    with pytest.raises(RequestError, match=param) as refused:
        engine.generate(input_ids=PROMPT, sampling_params=PARAMS | sampling)

    assert refused.value.status == 400


def test_other_models_refuse_these_settings(tmp_path, served):
    engine, _ = served
    plain = write_random_model(tmp_path)

    with pytest.raises(ConfigError, match=r"diffusion\.\*"):
        Engine(model_path=str(plain), processes="one", diffusion__steps=2, **FLAGS)
    with pytest.raises(ConfigError, match="speculative"):
        Engine(
            model_path=engine.config.model,
            processes="one",
            speculative_algorithm="NGRAM",
            **FLAGS,
        )
    with (
        Engine(model_path=str(plain), processes="one", **FLAGS) as other,
        pytest.raises(RequestError, match="confidence") as refused,
    ):
        other.generate("a", PARAMS, confidence=0.5)
    assert refused.value.param == "confidence"
