"""Vectors of tokens, weights of words and rewards of steps over HTTP."""

from __future__ import annotations

import base64
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.support.http import Client
from tests.support.scripted import make_engine

SIZE = 6
BGE = ("text", "tokens", "weights")


@asynccontextmanager
async def serving(checkpoint, **facts):
    engine = make_engine(checkpoint, context_len=32, vector_size=SIZE, **facts)
    client = Client(engine)
    try:
        yield client
    finally:
        await client.http.aclose()
        engine.manager.close()


@pytest.fixture
async def embedder(checkpoint):
    async with serving(checkpoint, task="embed", forms=BGE) as client:
        yield client


async def embed(client, given, **fields):
    response = await client.post("/v1/embeddings", {"input": given, **fields})
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


async def test_a_text_has_a_vector_of_each_token_where_asked(embedder):
    short, long = await embed(embedder, ["ab", "cde"], return_multivector=True)
    (text,) = await embed(embedder, "ab")
    written = await embed(embedder, "ab", return_multivector=True, encoding_format="base64")
    native = await embedder.post("/encode", {"text": "ab", "return_multivector": True})

    assert (np.shape(short), np.shape(long), np.shape(text)) == ((2, SIZE), (3, SIZE), (SIZE,))
    assert [np.frombuffer(base64.b64decode(row), "<f4").tolist() for row in written[0]] == short
    assert native.json()["embedding"] == short
    assert [one.form for one in embedder.engine.control.embeds] == [*["tokens"] * 2, "text"] + [
        "tokens"
    ] * 2


async def test_sparse_weights_are_of_words_once_and_of_no_special_token(embedder):
    tokenizer = embedder.engine.manager.tokenizer
    hidden = next(iter(tokenizer.special_ids))
    a, b = tokenizer.encode("ab")
    (found,) = await embed(embedder, [[hidden, a, b, a]], encoding_format="sparse")

    rows = {token: float(np.float32(max(np.cos(token + 1), 0))) for token in (a, b)}
    kept = {token: weight for token, weight in sorted(rows.items()) if weight > 0}
    assert found == {"indices": list(kept), "values": list(kept.values())}


async def test_late_interaction_ranks_by_vectors_of_tokens(embedder):
    body = {"query": "ab", "documents": ["xyz", "a-b"], "late_interaction": True}
    ranked = (await embedder.post("/v1/rerank", body)).json()
    vectors = [
        np.array(found)
        for found in await embed(embedder, ["ab", *body["documents"]], return_multivector=True)
    ]

    query, *documents = vectors
    scores = [float((query @ document.T).max(1).mean()) for document in documents]
    assert [one["index"] for one in ranked] == [1, 0]
    assert [one["score"] for one in ranked] == pytest.approx([scores[1], scores[0]], abs=1e-6)
    assert ranked[0]["score"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_multivector": True, "encoding_format": "sparse"}, "encoding_format"),
        ({"encoding_format": "sparse", "dimensions": 2}, "dimensions"),
    ],
)
async def test_forms_that_contradict_are_refused(embedder, fields, param):
    response = await embedder.post("/v1/embeddings", {"input": "ab", **fields})

    assert (response.status_code, response.json()["param"]) == (400, param)


async def test_forms_that_the_model_does_not_make_are_refused(checkpoint):
    async with serving(checkpoint, task="embed") as client:
        response = await client.post("/v1/embeddings", {"input": "ab", "return_multivector": True})
    async with serving(checkpoint, task="classify") as client:
        body = {"query": "a", "documents": ["b"], "late_interaction": True}
        ranked = await client.post("/v1/rerank", body)

    assert response.status_code == 400
    assert "makes a vector of each text, not a vector of each token" in response.text
    assert (ranked.status_code, ranked.json()["param"]) == (400, "late_interaction")


async def test_steps_are_judged_in_conversations_as_they_are(checkpoint):
    async with serving(checkpoint, task="classify", forms=("steps",)) as client:
        reply = await client.post("/classify", {"text": "<|im_start|>a"})
        ids = client.engine.control.embeds[-1].input_ids.tolist()
        others = [
            await client.post("/v1/classify", {"input": "a"}),
            await client.post("/v1/score", {"query": "a", "items": ["b"]}),
            await client.post("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ]

    assert np.shape(reply.json()["embedding"]) == (2, SIZE)
    assert len(ids) == 2
    assert [one.status_code for one in others] == [400, 400, 400]
    assert all("scores single steps: use /classify" in one.text for one in others)


async def test_chunks_are_read_together_and_get_a_vector_each(embedder):
    found = await embed(embedder, ["ab", "cde"], late_chunking=True)
    (request,) = embedder.engine.control.embeds

    assert np.shape(found) == (2, SIZE)
    assert request.form == "text"
    tokenizer = embedder.engine.manager.tokenizer
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "cde")]
    ids = request.input_ids.tolist()
    assert [ids[start:stop] for start, stop in request.spans] == parts


@pytest.mark.parametrize(
    ("given", "fields", "param"),
    [
        ("ab", {}, "input"),
        ([[1, 2]], {}, "input"),
        (["ab", ""], {}, "input"),
        (["ab"], {"return_multivector": True}, "late_chunking"),
        (["a" * 20, "b" * 20], {}, "input"),
    ],
)
async def test_chunks_that_cannot_be_are_refused(embedder, given, fields, param):
    response = await embedder.post(
        "/v1/embeddings", {"input": given, "late_chunking": True, **fields}
    )

    assert (response.status_code, response.json()["param"]) == (400, param)
