"""Texts are marked, expanded and cut as models of late interaction were trained."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import numpy as np
import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.serving.colbert import read_late_interaction
from tests.support.http import Client
from tests.support.scripted import make_engine, write_checkpoint

SIZE = 6
PYLATE = {
    "query_prefix": "<think>",
    "document_prefix": "</think>",
    "query_length": 8,
    "document_length": 6,
    "do_query_expansion": True,
    "attend_to_expansion_tokens": False,
    "skiplist_words": [",", "."],
}
FIRST = {
    "query_token_id": "<think>",
    "doc_token_id": "</think>",
    "query_maxlen": 8,
    "doc_maxlen": 6,
    "mask_punctuation": True,
    "attend_to_mask_tokens": True,
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose mask is one of its special tokens."""
    path = write_checkpoint(tmp_path / "model")
    read_late_interaction.cache_clear()
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mask_token": "<|im_start|>"}))
    return path


@asynccontextmanager
async def serving(path):
    facts = {"task": "embed", "forms": ("text", "tokens"), "vector_size": SIZE}
    engine = make_engine(path, context_len=64, **facts)
    client = Client(engine)
    try:
        yield client
    finally:
        await client.http.aclose()
        engine.manager.close()


def ids_of(client, *parts):
    """Token ids of texts, and of tokens by name in brackets."""
    tokenizer = client.engine.manager.tokenizer
    found = []
    for part in parts:
        if part.startswith("<"):
            found.append(tokenizer.token_id(part))
        else:
            found += tokenizer.encode(part, add_special_tokens=False)
    return found


@pytest.mark.parametrize(
    ("file", "raw", "hidden"),
    [("config_sentence_transformers.json", PYLATE, 4), ("artifact.metadata", FIRST, 0)],
)
async def test_queries_are_filled_up_and_documents_lose_punctuation(file, raw, hidden, folder):
    (folder / file).write_text(json.dumps(raw))
    async with serving(folder) as client:
        asked = {"input": "abc", "return_multivector": True, "prompt_name": "query"}
        query = (await client.post("/v1/embeddings", asked)).json()["data"][0]["embedding"]
        asked = {"input": "a,b.cdefg", "return_multivector": True}
        document = (await client.post("/v1/embeddings", asked)).json()["data"][0]["embedding"]
        plain = await client.post("/v1/embeddings", {"input": "abc"})
        first, second, third = client.engine.control.embeds

        # the marker comes after the first token
        masks = ["<|im_start|>"] * 4
        assert first.input_ids.tolist() == ids_of(client, "a", "<think>", "bc", *masks)
        assert (first.hidden, second.hidden) == (hidden, 0)
        assert second.input_ids.tolist() == ids_of(client, "a", "</think>", ",b.c")
        assert third.input_ids.tolist() == ids_of(client, "abc")
    assert plain.status_code == 200
    assert np.shape(query) == (8, SIZE)
    assert np.shape(document) == (4, SIZE)


async def test_documents_are_ranked_by_the_conventions_unless_asked_otherwise(folder):
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PYLATE))
    async with serving(folder) as client:
        body = {"query": "ab", "documents": ["xyz", "a-b"]}
        ranked = (await client.post("/v1/rerank", body)).json()
        forms = [request.form for request in client.engine.control.embeds]
        await client.post("/v1/rerank", body | {"late_interaction": False})
        plain = [request.form for request in client.engine.control.embeds[3:]]

    assert [one["index"] for one in ranked] == [1, 0]
    assert (forms, plain) == (["tokens"] * 3, ["text"] * 3)


async def test_other_roles_and_missing_tokens_are_refused(folder):
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps(PYLATE | {"query_prefix": "[Q] "})
    )
    async with serving(folder) as client:
        asked = {"input": "ab", "return_multivector": True}
        role = await client.post("/v1/embeddings", asked | {"prompt_name": "passage"})
        token = await client.post("/v1/embeddings", asked | {"prompt_name": "query"})

    assert (role.status_code, role.json()["param"]) == (400, "prompt_name")
    assert token.status_code == 400
    assert "no token '[Q] '" in token.text


def test_impossible_lengths_are_refused(folder):
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps(PYLATE | {"query_length": 3}))

    with pytest.raises(ConfigError, match="query_length must be in 4"):
        read_late_interaction(str(folder))


def test_other_models_have_no_conventions(folder):
    assert read_late_interaction(str(folder)) is None
