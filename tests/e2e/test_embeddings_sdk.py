"""The `openai` package against real servers of an encoder and of a cross-encoder."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.conftest import running
from tests.support.encoder import BEGIN, END, POSITIONS, SIZE, write_bert

pytestmark = pytest.mark.slow  # an encoder through torch takes seconds to start


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_bert(tmp_path_factory.mktemp("encoder"))
    with running(str(folder), "--is-embedding") as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def test_embeddings_of_a_batch_are_those_of_each_text(client, server):
    texts = ["hello", "a", "a longer text of many words"]
    batch = client.embeddings.create(model=server.name, input=texts)
    alone = [client.embeddings.create(model=server.name, input=text).data[0] for text in texts]

    assert [d.index for d in batch.data] == [0, 1, 2]
    for one, other in zip(batch.data, alone, strict=True):
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-5)
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    tokens = sum(len(text) + 2 for text in texts)
    assert (batch.usage.prompt_tokens, batch.usage.total_tokens) == (tokens, tokens)


def test_the_sdk_reads_base64_and_floats_alike(client, server):
    by_default = client.embeddings.create(model=server.name, input="x")  # base64 on the wire
    floats = client.embeddings.create(model=server.name, input="x", encoding_format="float")
    raw = client.embeddings.create(model=server.name, input="x", encoding_format="base64")

    assert by_default.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-6)
    decoded = np.frombuffer(base64.b64decode(raw.data[0].embedding), "<f4")
    assert decoded.tolist() == pytest.approx(floats.data[0].embedding, abs=1e-6)


def test_dimensions_cut_the_vector_and_keep_its_length(client, server):
    whole = client.embeddings.create(model=server.name, input="x").data[0].embedding
    short = client.embeddings.create(model=server.name, input="x", dimensions=5).data[0].embedding

    expected = np.array(whole[:5]) / np.linalg.norm(whole[:5])
    assert short == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=server.name, input="x", dimensions=SIZE + 1)
    assert caught.value.param == "dimensions"


def test_ids_and_text_give_the_same_vector(client, server):
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "hi"}).json()["tokens"]
    assert (ids[0], ids[-1]) == (BEGIN, END)

    by_ids = client.embeddings.create(model=server.name, input=[ids]).data[0].embedding
    by_text = client.embeddings.create(model=server.name, input="hi").data[0].embedding
    assert by_ids == pytest.approx(by_text, abs=1e-5)


def test_too_long_texts_are_refused_by_name(client, server):
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {POSITIONS}"):
        client.embeddings.create(model=server.name, input="x" * (POSITIONS + 1))


def test_an_encoder_does_not_chat(client, server):
    with pytest.raises(openai.BadRequestError, match="does not generate text"):
        client.chat.completions.create(
            model=server.name, messages=[{"role": "user", "content": "x"}]
        )


def test_an_encoder_is_healthy(server):
    assert httpx.get(f"{server.url}/health_generate").status_code == 200
    assert httpx.get(f"{server.url}/model_info").json()["is_generation"] is False


@pytest.mark.slow
def test_a_cross_encoder_ranks_pairs(tmp_path):
    folder = write_bert(tmp_path / "ranker", labels=1)
    documents = ["one", "another", "a third"]
    with running(str(folder)) as made, httpx.Client(base_url=made.url, timeout=60) as http:
        body = {"query": "which?", "documents": documents}
        ranked = http.post("/v1/rerank", json=body).json()
        pairs = [["which?", text] for text in documents]
        raw = http.post("/classify", json={"text": pairs}).json()
        scored = http.post("/v1/score", json={"query": "which?", "items": documents}).json()

    logits = [r["embedding"][0] for r in raw]
    assert [r["index"] for r in ranked] == np.argsort([-x for x in logits]).tolist()
    for row in ranked:
        expected = 1 / (1 + np.exp(-logits[row["index"]]))
        assert row["score"] == pytest.approx(expected, abs=1e-5)
    assert [s[0] for s in scored["scores"]] == pytest.approx(logits, abs=1e-5)
