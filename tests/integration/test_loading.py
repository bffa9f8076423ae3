"""Checkpoints of other formats, served by the whole engine in processes of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sylvan import Engine
from sylvan.protocol.errors import ConfigError
from tests.parity.serving import Serving
from tests.support.own_code import write_own_code
from tests.support.quantised_models import write_quantised_model
from tests.support.random_model import write_random_model

FLAGS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 4096}
PARAMS = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answer(model: object, *, prompt: str = "hello there", **flags: object) -> dict:
    with Engine(model_path=str(model), **FLAGS | {"processes": "one"} | flags) as engine:
        return engine.generate(prompt, PARAMS)


def test_all_formats_of_a_model_answer_the_same(tmp_path):
    pytest.importorskip("gguf")
    from tests.support import gguf_files

    path = write_random_model(tmp_path / "model")
    expected = answer(path)
    state = load_file(path / "model.safetensors")
    as_gguf = _gguf(gguf_files, path, state, tmp_path / "model.gguf")
    url = answer(f"file://{path}", processes="many")
    (path / "model.safetensors").unlink()
    torch.save(state, path / "pytorch_model.bin")

    found = [answer(path, load_format="pt"), answer(as_gguf, tokenizer=str(path)), url]

    assert [reply["output_ids"] for reply in found] == [expected["output_ids"]] * 3
    assert [reply["text"] for reply in found] == [expected["text"]] * 3


def _gguf(gguf_files, path: Path, state: dict[str, torch.Tensor], target: Path) -> Path:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(state)
    gguf_files.write_model(model, target, "llama", "F32", lambda out: None)
    return target


@pytest.mark.parametrize("case", ["gguf Q4_0", "gguf Q6_K", "gptq", "fp8-block", "quark-mxfp4"])
def test_quantised_checkpoints_run_in_step_programs_by_default(tmp_path, case):
    """Sums in parts, for the same bits on any number of ranks, have no quantised kernels."""
    if case.startswith("gguf"):
        pytest.importorskip("gguf")
    path = write_quantised_model(tmp_path / "model", case)
    with Engine(model=str(path), device="cpu", threads=1, processes="one") as engine:
        info = engine.get_server_info()

    assert info["extra"]["runner"].startswith("program")
    assert info["config"]["parallel"]["same_bits"] is False


@pytest.mark.slow
def test_code_of_a_checkpoint_is_run_in_all_processes_if_that_is_allowed(tmp_path):
    path = write_own_code(tmp_path / "own")

    with pytest.raises(ConfigError, match="--trust-remote-code"):
        answer(path)
    found = answer(path, trust_remote_code=True, processes="many", prompt="w5 w9")

    serving = Serving(path, options={"trusted": True})
    expected = serving.generate([[5, 9]], max_new_tokens=PARAMS["max_new_tokens"])
    assert [found["output_ids"]] == expected
    assert found["text"].split() == [f"w{token}" for token in expected[0] if token]


def test_a_tokenizer_that_does_not_fit_is_refused_at_the_start(tmp_path):
    path = write_random_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))

    with pytest.raises(ConfigError, match=r"token .* but the model has only 100"):
        answer(path)


def test_a_missing_tokenizer_is_refused_at_the_start(tmp_path):
    path = write_random_model(tmp_path / "model")
    (path / "tokenizer.json").unlink()

    with pytest.raises(ConfigError, match="has no tokenizer that can be read") as error:
        answer(path)
    assert "\n" not in str(error.value)
