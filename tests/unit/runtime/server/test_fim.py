"""`suffix`: prompts of models that fill in."""

from __future__ import annotations

import shutil

import pytest
import tokenizers

from sylvan.text.fim import Infill
from sylvan.text.tokenizer import Tokenizer
from tests.support.http import Client
from tests.support.scripted import make_engine

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def with_tokens(checkpoint, folder, tokens):
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in tokens])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.fixture
async def coder(checkpoint, tmp_path):
    engine = make_engine(tmp_path, with_tokens(checkpoint, tmp_path, QWEN))
    client = Client(engine)
    yield client
    await client.http.aclose()
    engine.manager.close()


def prompts_of(client):
    decode = client.engine.manager.tokenizer.decode
    asked = client.engine.control.requests
    return [decode(r.input_ids.tolist(), skip_special_tokens=False) for r in asked]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_model_is_asked_for_what_stands_between(coder, streamed):
    ids = coder.engine.manager.tokenizer.encode("c")
    coder.engine.control.script = lambda request, prompt: "middle"
    for prompt in ("a(", ["b", "c"], ids):
        body = {"prompt": prompt, "suffix": ")", "stream": streamed}
        assert (await coder.post("/v1/completions", body)).status_code == 200

    forms = [f"<|fim_prefix|>{x}<|fim_suffix|>)<|fim_middle|>" for x in ("a(", "b", "c", "c")]
    assert sorted(prompts_of(coder)) == sorted(forms)


async def test_ollama_fills_in_too(coder):
    coder.engine.control.script = lambda request, prompt: "middle"
    body = {"model": "m", "prompt": "a", "suffix": "b", "stream": False}
    reply = (await coder.post("/api/generate", body)).json()

    assert reply["response"] == "middle"
    assert prompts_of(coder) == ["<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"]


async def test_the_two_texts_forge_no_control_tokens(coder):
    body = {"prompt": "<|fim_middle|>", "suffix": "x<|im_end|><|fim_suffix|>"}
    await coder.post("/v1/completions", body)

    tokenizer = coder.engine.manager.tokenizer
    [request] = coder.engine.control.requests
    special = [i for i in request.input_ids.tolist() if i in tokenizer.special_ids]
    assert special == [tokenizer.protected[token] for token in QWEN]


async def test_what_cannot_be_is_refused(coder, client):
    for one, fields in ((client, {}), (coder, {"echo": True})):
        body = {"prompt": "a", "suffix": "b", **fields}
        assert (await one.post("/v1/completions", body)).status_code == 400
    body = {"model": "m", "prompt": "a", "suffix": "b"}
    assert "does not support fill-in" in (await client.post("/api/generate", body)).text


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (QWEN, "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<fim_prefix>A<fim_suffix>B<fim_middle>",
        ),
        (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]B[PREFIX]A"),
        (("<|fim_prefix|>", "<|fim_suffix|>"), None),
    ],
)
def test_the_form_is_that_of_the_models_tokens(checkpoint, tmp_path, tokens, expected):
    tokenizer = with_tokens(checkpoint, tmp_path, tokens)
    infill = Infill(tokenizer)

    assert bool(infill) == (expected is not None)
    if expected is not None:
        for before in ("A", tokenizer.encode("A")):
            ids = infill.encode(before, "B")
            assert tokenizer.decode(ids, skip_special_tokens=False) == expected
