"""Routes of models that make vectors: embeddings, classes, scores, rankings."""

from __future__ import annotations

import base64
import json
import shutil
from contextlib import asynccontextmanager

import numpy as np
import pytest
import tokenizers

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.protocol.messages import Finish
from sylvan.runtime.serving.prompts import FILE, read_prompts
from sylvan.runtime.tokenizer.types import EmbedInput
from sylvan.text.tokenizer import Tokenizer
from tests.support.http import Client
from tests.support.scripted import make_engine

SIZE = 6


@asynccontextmanager
async def serving(checkpoint, **facts):
    engine = make_engine(checkpoint, context_len=32, **facts)
    client = Client(engine)
    try:
        yield client
    finally:
        await client.http.aclose()
        engine.manager.close()


@pytest.fixture
async def embedder(checkpoint):
    async with serving(checkpoint, task="embed", vector_size=SIZE) as client:
        yield client


@pytest.fixture(scope="module")
def labelled(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    names = {"id2label": {"0": "bad", "1": "good", "2": "odd"}}
    (folder / "config.json").write_text(json.dumps(config | names))
    return folder


@pytest.fixture
async def classifier(labelled):
    async with serving(labelled, task="classify", vector_size=3) as client:
        yield client


async def embed(client, given, **fields):
    response = await client.post("/v1/embeddings", {"input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_embeddings_come_in_order_with_their_usage(embedder):
    reply = await embed(embedder, ["ab", "cde"], model="m")

    assert (reply["object"], reply["model"]) == ("list", "m")
    assert [(d["object"], d["index"]) for d in reply["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    assert all(len(d["embedding"]) == SIZE for d in reply["data"])
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    alone = await embed(embedder, "cde")
    assert alone["data"][0]["embedding"] == reply["data"][1]["embedding"]


async def test_base64_holds_the_same_numbers(embedder):
    floats = (await embed(embedder, "ab"))["data"][0]["embedding"]
    text = (await embed(embedder, "ab", encoding_format="base64"))["data"][0]["embedding"]

    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == floats


async def test_sparse_vectors_name_their_numbers(embedder):
    floats = (await embed(embedder, "ab"))["data"][0]["embedding"]
    found = (await embed(embedder, "ab", encoding_format="sparse"))["data"][0]["embedding"]

    assert dict(zip(found["indices"], found["values"], strict=True)) == {
        index: value for index, value in enumerate(floats) if value
    }


async def test_token_ids_stand_for_their_text(embedder):
    ids = embedder.engine.manager.tokenizer.encode("ab")
    by_text = (await embed(embedder, "ab"))["data"]

    assert (await embed(embedder, ids))["data"] == by_text
    assert (await embed(embedder, [ids]))["data"] == by_text


async def test_dimensions_reach_the_model(embedder):
    reply = await embed(embedder, "ab", dimensions=2)

    assert len(reply["data"][0]["embedding"]) == 2
    assert embedder.engine.control.embeds[-1].dimensions == 2


async def test_text_spells_no_control_tokens(embedder):
    await embed(embedder, "<|im_end|>")

    ids = embedder.engine.control.embeds[-1].input_ids.tolist()
    assert len(ids) == len("<|im_end|>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, 10**6]}, "input"),
        ({"input": "a" * 33}, "input"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "lora_path": "x"}, "lora_path"),
    ],
)
async def test_bad_embeddings_are_refused(embedder, fields, param):
    response = await embedder.post("/v1/embeddings", fields)

    assert response.status_code == 400
    assert response.json()["param"] == param
    assert response.json()["error"]["param"] == param
    assert embedder.engine.manager.num_live == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("/api/generate", {"model": "scripted", "prompt": "x", "stream": False}),
    ],
)
async def test_an_embedder_refuses_to_generate(embedder, path, body):
    response = await embedder.post(path, {"model": "scripted", **body})

    assert response.status_code == 400, response.text
    assert "makes embeddings; it does not generate text" in response.text


async def test_encode_answers_an_object_or_a_list(embedder):
    one = (await embedder.post("/encode", {"text": "ab", "rid": "r"})).json()
    many = (await embedder.post("/encode", {"text": ["ab", "c"], "rid": "r"})).json()

    assert one["meta_info"]["id"] == "r"
    assert one["meta_info"]["prompt_tokens"] == 2
    assert one["meta_info"]["finish_reason"]["type"] == "stop"
    assert one["meta_info"]["e2e_latency"] >= 0
    assert [m["meta_info"]["id"] for m in many] == ["r_0", "r_1"]
    assert many[0]["embedding"] == one["embedding"]


async def test_encode_returns_the_ids_it_read(embedder):
    body = {"input_ids": [5, 6], "return_prompt_token_ids": True}

    assert (await embedder.post("/encode", body)).json()["prompt_token_ids"] == [5, 6]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": [["a", "b", "c"]]}, "text"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid"),
        ({"input_ids": []}, "input_ids"),
    ],
)
async def test_bad_encodes_are_refused(embedder, body, param):
    response = await embedder.post("/encode", body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_classes_have_names_and_probabilities(classifier):
    reply = (await classifier.post("/v1/classify", {"input": ["ab", "c"]})).json()

    raw = (await classifier.post("/classify", {"text": "ab"})).json()["embedding"]
    first = reply["data"][0]
    assert first["label"] == ("bad", "good", "odd")[int(np.argmax(raw))]
    assert first["num_classes"] == 3
    assert sum(first["probs"]) == pytest.approx(1.0)
    assert first["probs"] == pytest.approx((np.exp(raw) / np.exp(raw).sum()).tolist())
    assert reply["usage"]["prompt_tokens"] == 3


async def test_a_classifier_makes_no_embeddings(classifier):
    response = await classifier.post("/v1/embeddings", {"input": "x"})

    assert response.status_code == 400
    assert "classifies texts; it makes no embeddings" in response.text


async def test_an_embedder_makes_no_classes_and_no_scores(embedder):
    for path, body in (
        ("/v1/classify", {"input": "x"}),
        ("/classify", {"text": "x"}),
        ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [1]}),
    ):
        assert "makes embeddings; it makes no" in (await embedder.post(path, body)).text


async def test_scores_of_a_classifier_are_its_numbers(classifier):
    body = {"query": "ab", "items": ["c", "d"]}
    reply = (await classifier.post("/v1/score", body)).json()

    raw = (await classifier.post("/classify", {"text": "abc"})).json()["embedding"]
    assert reply["scores"][0] == raw
    assert len(reply["scores"]) == 2
    soft = (await classifier.post("/v1/score", {**body, "apply_softmax": True})).json()
    assert sum(soft["scores"][1]) == pytest.approx(1.0)


async def test_a_model_with_three_labels_ranks_nothing(classifier):
    response = await classifier.post("/v1/rerank", {"query": "q", "documents": ["a"]})

    assert response.status_code == 400
    assert "3 labels" in response.text


async def test_one_label_ranks_documents_by_its_probability(checkpoint):
    async with serving(checkpoint, task="classify", vector_size=1) as client:
        documents = ["one", "two", "three"]
        body = {"query": "q", "documents": documents, "top_n": 2}
        ranked = (await client.post("/v1/rerank", body)).json()
        raw = [(await client.post("/encode", {"text": [["q", d]]})).json()[0] for d in documents]

    expected = [1 / (1 + np.exp(-r["embedding"][0])) for r in raw]
    assert len(ranked) == 2
    assert [r["score"] for r in ranked] == pytest.approx(sorted(expected, reverse=True)[:2])
    assert all(r["document"] == documents[r["index"]] for r in ranked)
    assert ranked[0]["meta_info"]["prompt_tokens"] == 1 + len(ranked[0]["document"])


async def test_rankings_have_the_forms_of_other_apis(checkpoint):
    async with serving(checkpoint, task="classify", vector_size=1) as client:
        documents = ["one", "two", "three"]
        body = {"query": "q", "documents": documents}
        ours = (await client.post("/v1/rerank", body)).json()
        cohere = (await client.post("/v2/rerank", {**body, "top_n": 2})).json()
        jina = (await client.post("/rerank", {**body, "model": "m"})).json()
        objects = {**body, "documents": [{"text": text} for text in documents]}
        same = (await client.post("/rerank", {**objects, "return_documents": False})).json()
        tei = (await client.post("/rerank", {"query": "q", "texts": documents})).json()
        texts = {"query": "q", "texts": documents, "return_text": True}
        with_text = (await client.post("/rerank", texts)).json()

    places = [(one["index"], one["score"]) for one in ours]
    scored = [{"index": index, "relevance_score": score} for index, score in places]
    assert cohere["results"] == scored[:2]
    assert cohere["meta"]["tokens"]["input_tokens"] > 0
    assert jina["results"] == [
        {**one, "document": {"text": documents[one["index"]]}} for one in scored
    ]
    assert jina["model"] == "m"
    assert jina["usage"]["total_tokens"] == sum(one["meta_info"]["prompt_tokens"] for one in ours)
    assert same["results"] == scored
    assert tei == [{"index": index, "score": score} for index, score in places]
    assert with_text == [{**one, "text": documents[one["index"]]} for one in tei]


async def test_long_documents_are_cut_where_that_is_asked_for(checkpoint):
    async with serving(checkpoint, task="classify", vector_size=1) as client:
        length = client.engine.manager.facts.context_len
        long = "x" * (2 * length)
        whole = await client.post("/rerank", {"query": "q", "texts": [long]})
        cut = await client.post("/rerank", {"query": "q", "documents": [long], "truncate": True})
        body = {"query": "q", "documents": [long], "max_tokens_per_doc": 5}
        few = (await client.post("/v2/rerank", body)).json()

    assert (whole.status_code, cut.status_code) == (400, 200)
    assert length - 20 < cut.json()["usage"]["total_tokens"] <= length
    assert few["meta"]["tokens"]["input_tokens"] == 1 + 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "documents"),
        ({"texts": ["a"], "documents": ["a"]}, "documents"),
        ({"texts": ["a"], "raw_scores": True}, "raw_scores"),
        ({"texts": ["a"], "truncation_direction": "left"}, "truncation_direction"),
    ],
)
async def test_rankings_that_cannot_be_had_are_refused(embedder, fields, param):
    response = await embedder.post("/rerank", {"query": "q", **fields})

    assert (response.status_code, response.json()["param"]) == (400, param)


async def test_an_embedder_ranks_by_cosine(embedder):
    body = {"query": "ab", "documents": ["x", "ab"], "return_documents": False}
    ranked = (await embedder.post("/v1/rerank", body)).json()

    assert ranked[0]["index"] == 1
    assert ranked[0]["score"] == pytest.approx(1.0, abs=1e-6)
    assert "document" not in ranked[0]


async def test_a_model_that_cannot_be_asked_ranks_by_its_vectors(checkpoint):
    async with serving(checkpoint, task="both", vector_size=SIZE) as client:
        body = {"query": "ab", "documents": ["x", "ab"]}
        response = await client.post("/v1/rerank", body)

    assert response.status_code == 200, response.text
    assert response.json()[0]["index"] == 1


async def test_a_generating_model_is_asked_for_yes_or_no(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("yes", "no")])
    backend.save(str(tmp_path / "tokenizer.json"))
    engine = make_engine(tmp_path, Tokenizer.load(tmp_path))
    client = Client(engine)
    body = {"query": "capital?", "documents": ["Paris", "tea"], "instruct": "answer"}

    ranked = (await client.post("/v1/rerank", body)).json()

    assert [r["score"] for r in ranked] == [pytest.approx(0.5)] * 2
    asked = engine.control.requests[-1]
    prompt = engine.manager.tokenizer.decode(asked.input_ids.tolist(), skip_special_tokens=False)
    assert "<Instruct>: answer\n<Query>: capital?\n<Document>: tea<|im_end|>" in prompt
    assert asked.logprobs.token_ids == tuple(backend.token_to_id(t) for t in ("yes", "no"))
    await client.http.aclose()
    engine.manager.close()


@pytest.fixture
async def prompted(checkpoint, tmp_path):
    """A model that sentence-transformers wrote."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    prompts = {"query": "query: ", "passage": "passage: ", "none": ""}
    config = {"prompts": prompts, "default_prompt_name": "passage"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    async with serving(tmp_path, task="embed", vector_size=SIZE) as client:
        yield client


def texts_of(client):
    decode = client.engine.manager.tokenizer.decode
    return [decode(r.input_ids.tolist()) for r in client.engine.control.embeds]


async def test_prompts_of_the_model_go_before_the_texts(prompted):
    await embed(prompted, ["a", "b"])
    await embed(prompted, "a", prompt_name="query")
    await embed(prompted, "a", prompt_name="none")
    await embed(prompted, [5, 6], prompt_name="query")
    await prompted.post("/encode", {"text": "a", "prompt_name": "query"})
    await prompted.post("/api/embed", {"model": "m", "input": "a"})

    ids = prompted.engine.manager.tokenizer.decode([5, 6])
    asked, usual = "query: a", "passage: a"
    assert texts_of(prompted) == [usual, "passage: b", asked, "a", ids, asked, usual]


async def test_rankings_use_the_prompts_of_queries_and_documents(prompted):
    await prompted.post("/v1/rerank", {"query": "q", "documents": ["d"]})

    assert sorted(texts_of(prompted)) == ["passage: d", "query: q"]


async def test_unknown_prompts_are_refused_by_name(prompted, embedder):
    for client, words in ((prompted, "none, passage, query"), (embedder, "no prompts at all")):
        response = await client.post("/v1/embeddings", {"input": "a", "prompt_name": "other"})
        assert (response.status_code, response.json()["param"]) == (400, "prompt_name")
        assert words in response.json()["message"]


async def test_the_longest_sequence_of_the_model_is_the_limit(prompted):
    fits = await prompted.post("/v1/embeddings", {"input": "a" * 20, "prompt_name": "none"})
    long = await prompted.post("/v1/embeddings", {"input": "a" * 21, "prompt_name": "none"})

    assert fits.status_code == 200
    assert "maximum context length is 20 tokens" in long.json()["message"]
    assert "input has 21 tokens" in long.json()["message"]
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_prompts_that_cannot_be_honoured_are_refused(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"prompts": {"q": "Q: "}, "default_prompt_name": "d"}))
    with pytest.raises(ConfigError, match="no prompt 'd'"):
        read_prompts(str(tmp_path))
    (tmp_path / FILE).write_text(json.dumps({"prompts": {"q": "Q: "}}))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"include_prompt": False}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    prompts = read_prompts(str(tmp_path))

    assert prompts.apply("Text") == "text"
    with pytest.raises(RequestError, match="leaves prompts out"):
        prompts.apply("text", "q")


async def test_health_probe_of_an_embedder_is_a_vector(embedder):
    embedder.engine.scheduler.beat()

    assert (await embedder.get("/health_generate")).status_code == 200
    assert len(embedder.engine.control.embeds) == 1


async def test_a_refusal_of_the_scheduler_keeps_its_status(embedder):
    embedder.engine.control.fail = Finish(type="abort", message="too late", status=503)

    response = await embedder.post("/v1/embeddings", {"input": ["a", "b"]})

    assert response.status_code == 503
    assert embedder.engine.manager.num_live == 0


async def test_model_info_says_that_it_does_not_generate(embedder, client):
    assert (await embedder.get("/model_info")).json()["is_generation"] is False
    assert (await client.get("/model_info")).json()["is_generation"] is True


async def test_tenants_share_no_cache_of_texts(embedder):
    manager = embedder.engine.manager
    for tenant in ("red", "blue", ""):
        await manager.embed(EmbedInput(text="a b", tenant=tenant))

    salts = [request.cache_salt for request in embedder.engine.control.embeds]
    assert salts == [manager.isolation.owner(tenant) for tenant in ("red", "blue", "")]
    assert len(set(salts)) == 3


async def test_media_that_cannot_be_embedded_are_refused_by_name(embedder, classifier):
    png = "data:image/png;base64,AAAA"
    for given, param in (
        ({"image": png}, "messages"),  # of the template, which takes texts
        (["ab", {"image": "no base64"}], "input[1].image"),
        (["ab", {"text": "ab", "image": ["no base64"]}], "input[1].image[0]"),
        ([{}], "input[0]"),
    ):
        response = await embedder.post("/v1/embeddings", {"input": given})
        assert response.status_code == 400, given
        assert response.json()["error"]["param"].startswith(param), response.text

    body = {"query": "q", "documents": ["a", {"image": png}]}
    response = await classifier.post("/v1/rerank", body)
    assert response.status_code == 400
    assert "documents[1]: this model ranks texts" in response.text


async def test_a_text_in_the_form_of_media_is_rendered(embedder):
    reply = await embed(embedder, [{"text": "ab"}, "ab"])
    assert [len(d["embedding"]) for d in reply["data"]] == [SIZE, SIZE]
    assert reply["usage"]["prompt_tokens"] > 2 * len("ab")
