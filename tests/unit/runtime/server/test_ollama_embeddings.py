"""Ollama's routes for vectors, over a scripted embedder."""

from __future__ import annotations

import pytest

from tests.unit.runtime.server.test_embeddings import SIZE, embed, embedder, serving

__all__ = ["embedder"]


async def test_vectors_are_those_of_the_openai_route(embedder):
    body = {"model": "m", "input": ["ab", "cde"], "options": {"num_ctx": 99}, "keep_alive": -1}
    reply = (await embedder.post("/api/embed", body)).json()

    theirs = await embed(embedder, ["ab", "cde"])
    assert reply["embeddings"] == [d["embedding"] for d in theirs["data"]]
    assert (reply["model"], reply["prompt_eval_count"]) == ("m", 5)
    assert reply["total_duration"] >= 0
    one = (await embedder.post("/api/embed", {"model": "m", "input": "ab"})).json()
    assert one["embeddings"] == reply["embeddings"][:1]
    old = (await embedder.post("/api/embeddings", {"model": "m", "prompt": "ab"})).json()
    assert old == {"embedding": reply["embeddings"][0]}


async def test_dimensions_shorten_vectors(embedder):
    body = {"model": "m", "input": "ab", "dimensions": 2}
    assert len((await embedder.post("/api/embed", body)).json()["embeddings"][0]) == 2
    body["dimensions"] = SIZE + 1
    assert (await embedder.post("/api/embed", body)).status_code == 400


async def test_long_texts_are_cut_unless_that_is_forbidden(embedder):
    body = {"model": "m", "input": ["a" * 32 + "b" * 5, "b" * 9]}
    reply = (await embedder.post("/api/embed", body)).json()

    cut = embedder.engine.control.embeds[-2].input_ids.tolist()
    assert len(cut) == 32
    assert len(set(cut)) == 1
    assert reply["prompt_eval_count"] == 32 + 9
    huge = {"model": "m", "input": "a" * 10**6}
    assert (await embedder.post("/api/embed", huge)).status_code == 200
    refused = await embedder.post("/api/embed", {**body, "truncate": False})
    assert refused.status_code == 400
    assert "maximum context length is 32 tokens" in refused.json()["error"]
    assert "input has 37 tokens" in refused.json()["error"]


async def test_no_text_asks_for_the_model_to_be_loaded(embedder):
    for body in ({"input": ""}, {"input": []}):
        reply = await embedder.post("/api/embed", {"model": "m", **body})
        assert reply.json()["embeddings"] == []
    assert (await embedder.post("/api/embeddings", {"model": "m"})).json() == {"embedding": []}
    assert embedder.engine.control.embeds == []


@pytest.mark.parametrize(
    "fields",
    [{"input": ["a", ""]}, {"input": 5}, {"input": "a", "options": {"temprature": 1}}, {}],
)
async def test_bad_input_is_refused_in_ollamas_shape(embedder, fields):
    response = await embedder.post("/api/embed", {"model": "m", **fields})

    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


async def test_a_model_says_what_it_can_do(embedder, client, checkpoint):
    for one, expected in ((embedder, {"embedding"}), (client, {"completion", "tools", "thinking"})):
        shown = (await one.post("/api/show", {"model": "scripted"})).json()
        assert set(shown["capabilities"]) == expected
    async with serving(checkpoint, task="both", vector_size=SIZE) as both:
        shown = (await both.post("/api/show", {"model": "scripted"})).json()
    assert {"completion", "embedding"} <= set(shown["capabilities"])
    [loaded] = (await embedder.get("/api/ps")).json()["models"]
    assert (loaded["name"], loaded["context_length"]) == ("scripted", 32)


async def test_a_model_that_generates_makes_no_vectors(client):
    response = await client.post("/api/embed", {"model": "m", "input": "x"})

    assert response.status_code == 400
    assert "makes no embeddings" in response.json()["error"]
