"""Models whose Python comes with the checkpoint: run by permission only, and then right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import dynamic_module_utils

from sylvan.checkpoints.code import load_class
from sylvan.config.checkpoint import model_facts
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import read_config
from sylvan.runtime.models.registry import choose_path, load_config
from sylvan.text.tokenizer import Tokenizer
from tests.parity.checkpoints import greedy, write
from tests.parity.rare import ALL
from tests.parity.serving import Serving
from tests.support.own_code import AUTO_MAP, VOCAB, write_own_code

NEW = 24
FLAG = "--trust-remote-code"


@pytest.fixture
def folder(tmp_path):
    return write_own_code(tmp_path / "own")


@pytest.fixture
def oracle(folder, tmp_path, monkeypatch):
    """The model as transformers loads it, which copies its code elsewhere."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, attn_implementation="eager"
    ).eval()


def test_its_tokens_are_those_of_transformers(folder, oracle):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (40, 3, 17)]
    # without a cache, which generate() of transformers 5.24 gives by a name that this code predates
    wanted = [greedy(oracle, prompt, NEW, use_cache=False) for prompt in prompts]
    whole = Serving(folder, options={"trusted": True})
    chunked = Serving(folder, options={"trusted": True}, chunk_tokens=16, max_batch_tokens=19)

    assert len({tuple(tokens) for tokens in wanted}) == 3, "the model does not look at its prompts"
    assert type(oracle).__module__ != load_class(folder, AUTO_MAP["AutoConfig"]).__module__
    for serving in (whole, whole, chunked):  # the second time from the cache
        assert serving.generate(prompts, max_new_tokens=NEW) == wanted
    assert whole.scheduler.load().cached_prompt_tokens > 0


@pytest.mark.parametrize("own", [True, False])
def test_pickled_weights_are_read_on_this_path_too(tmp_path, own):
    if own:
        path, kinds = write_own_code(tmp_path / "m"), {"trusted": True}
    else:
        path, kinds = tmp_path / "m", {}
        write(ALL["cohere2-moe"](), 3, path)
    prompts = [[5, 9, 63], [7] * 20]
    wanted = Serving(path, options=kinds).generate(prompts, max_new_tokens=NEW)
    state = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(state, path / "pytorch_model.bin")

    assert choose_path(read_config(path), path).config.path == "transformers"
    found = Serving(path, options=kinds | {"load_format": "pt"})
    assert found.generate(prompts, max_new_tokens=NEW) == wanted
    with pytest.raises(ConfigError, match="--load-format pt") as error:
        Serving(path, options=kinds)
    assert "\n" not in str(error.value)


def test_pickles_that_hold_more_than_tensors_are_refused_on_this_path_too(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**state, "more": Path(folder)}, folder / "pytorch_model.bin")

    with pytest.raises(ConfigError, match="contains other objects than tensors") as error:
        Serving(folder, options={"trusted": True, "load_format": "pt"})
    assert "\n" not in str(error.value)


def test_without_permission_nothing_of_it_is_run(folder):
    for name in ("configuration_own.py", "modeling_own.py", "tokenization_own.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')")
    for look in (
        lambda: load_config(folder),
        lambda: model_facts(str(folder)),
        lambda: Tokenizer.load(folder),
    ):
        with pytest.raises(ConfigError, match=FLAG) as error:
            look()
        assert "\n" not in str(error.value)

    assert not (folder / "ran").exists()


def test_with_permission_sizes_and_words_come_from_it(folder):
    facts = model_facts(str(folder), trusted=True)
    tokenizer = Tokenizer.load(folder, trusted=True)

    assert (facts.context_len, facts.vocab_size) == (512, VOCAB)
    assert facts.kv_per_token == 2 * 2 * 2 * 8
    assert tokenizer.encode("w5 w9 w63") == [5, 9, 63]


def test_a_model_that_is_served_natively_needs_no_permission():
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "auto_map": AUTO_MAP}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}

    choice = choose_path(raw | sizes | {"num_attention_heads": 4})

    assert (choice.config.path, choice.config.code) == ("native", None)


def test_another_model_under_a_known_type_is_not_taken_for_that(folder):
    raw = read_config(folder) | {"model_type": "llama"}

    with pytest.raises(ConfigError, match=rf"\(modeling_own.OwnForCausalLM\), .*{FLAG}"):
        choose_path(raw)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("modeling_gone.M", "there is no modeling_gone.py"),
        ("org/repo--modeling_own.OwnForCausalLM", "not a class in a file of that directory"),
        ("..modeling_own.OwnForCausalLM", "not a class in a file"),
        ("modeling_own.Other", "AttributeError: .*has no attribute 'Other'"),
        ("broken.M", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_code_that_does_not_work_is_one_sentence(folder, name, words):
    (folder / "broken.py").write_text("class M: pass\n1 / 0\n")
    raw = read_config(folder)
    raw["auto_map"] = AUTO_MAP | {"AutoModelForCausalLM": name}
    (folder / "config.json").write_text(json.dumps(raw))

    with pytest.raises(ConfigError, match=words) as error:
        load_config(folder, trusted=True)
    assert "\n" not in str(error.value)
