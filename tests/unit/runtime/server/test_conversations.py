"""`/v1/conversations` over a scripted engine."""

from __future__ import annotations

import pytest

from tests.support.http import Client, checkpoint, client, engine, two_tenants

__all__ = ["checkpoint", "client", "engine"]

USER = {"role": "user", "content": "My name is Ada."}


def says(client, text):
    client.engine.control.script = lambda request, prompt: text


def prompt_of(client):
    ids = client.engine.control.requests[-1].input_ids.tolist()
    return client.engine.manager.tokenizer.decode(ids, skip_special_tokens=False)


async def make(client, **body):
    response = await client.post("/v1/conversations", body)
    assert response.status_code == 200, response.text
    return response.json()


async def items_of(client, name, query=""):
    response = await client.get(f"/v1/conversations/{name}/items{query}")
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_conversation_is_kept_changed_and_deleted(client):
    made = await make(client, items=[USER], metadata={"a": "b"})
    path = f"/v1/conversations/{made['id']}"

    assert (await client.get(path)).json() == made
    assert made["object"] == "conversation"
    changed = (await client.post(path, {"metadata": {"c": "d"}})).json()
    assert changed == {**made, "metadata": {"c": "d"}}
    gone = (await client.http.delete(path)).json()
    assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    assert (await client.get(path)).status_code == 404


async def test_items_are_added_listed_read_and_deleted(client):
    name = (await make(client))["id"]
    path = f"/v1/conversations/{name}/items"
    added = (await client.post(path, {"items": [USER, {**USER, "content": "Hm."}]})).json()["data"]

    assert [item["content"] for item in added] == ["My name is Ada.", "Hm."]
    assert (await items_of(client, name, "?order=asc"))["data"] == added
    first = await items_of(client, name, "?limit=1")
    assert (first["data"], first["has_more"]) == ([added[1]], True)
    rest = await items_of(client, name, f"?after={first['last_id']}")
    assert (rest["data"], rest["has_more"]) == ([added[0]], False)
    assert (await client.get(f"{path}/{added[0]['id']}")).json() == added[0]
    await client.http.delete(f"{path}/{added[0]['id']}")
    assert (await items_of(client, name))["data"] == [added[1]]
    assert (await client.get(f"{path}/{added[0]['id']}")).status_code == 404


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", [str, lambda name: {"id": name}])
async def test_responses_continue_with_a_conversation(client, streamed, form):
    name = (await make(client, items=[USER]))["id"]
    body = {"conversation": form(name), "stream": streamed, "store": False}
    says(client, "Hi, Ada!")
    await client.post("/v1/responses", {**body, "input": "Hello"})
    says(client, "Ada.")
    reply = await client.post("/v1/responses", {**body, "input": "Who am I?"})
    prompt = prompt_of(client)

    for text in ("My name is Ada.", "Hello", "Hi, Ada!", "Who am I?"):
        assert prompt.count(text) == 1
    if not streamed:
        assert reply.json()["conversation"] == {"id": name}
    kept = (await items_of(client, name, "?order=asc"))["data"]
    said = [
        i["content"] if isinstance(i["content"], str) else i["content"][0]["text"] for i in kept
    ]
    assert said == ["My name is Ada.", "Hello", "Hi, Ada!", "Who am I?", "Ada."]
    assert len({item["id"] for item in kept}) == 5


async def test_a_response_that_fails_leaves_the_conversation_alone(client):
    name = (await make(client, items=[USER]))["id"]
    body = {"conversation": name, "input": "x", "max_output_tokens": 10**6}

    assert (await client.post("/v1/responses", body)).status_code == 400
    assert len((await items_of(client, name))["data"]) == 1


async def test_tenants_do_not_see_each_other(engine, tmp_path):
    client = two_tenants(engine, tmp_path)
    client.http.headers["authorization"] = "Bearer red"
    name = (await make(client, items=[USER]))["id"]
    client.http.headers["authorization"] = "Bearer blue"
    path = f"/v1/conversations/{name}"

    assert (await client.get(path)).status_code == 404
    assert (await client.get(f"{path}/items")).status_code == 404
    assert (await client.post(path, {"metadata": {}})).status_code == 404
    assert (await client.post(f"{path}/items", {"items": [USER]})).status_code == 404
    assert (await client.http.delete(path)).status_code == 404
    answer = await client.post("/v1/responses", {"input": "x", "conversation": name})
    assert answer.status_code == 404
    client.http.headers["authorization"] = "Bearer red"
    assert len((await items_of(client, name))["data"]) == 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"conversation": "x"}, 400, "conversation"),
        ({"conversation": "conv_none"}, 404, "conversation"),
        ({"conversation": {"id": "conv_none"}}, 404, "conversation"),
    ],
)
async def test_conversations_that_there_are_not_are_refused(client, fields, status, param):
    response = await client.post("/v1/responses", {"input": "x", **fields})

    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_a_response_and_a_conversation_exclude_each_other(client):
    name = (await make(client))["id"]
    first = (await client.post("/v1/responses", {"input": "x"})).json()
    body = {"input": "y", "conversation": name, "previous_response_id": first["id"]}
    response = await client.post("/v1/responses", body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "conversation")


async def test_items_that_no_response_could_take_are_refused(client):
    bad = {"role": "user", "content": [{"type": "input_image"}]}
    response = await client.post("/v1/conversations", {"items": [USER, bad]})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "items[1].content[0].image_url"


async def test_a_server_that_keeps_nothing_says_so(engine):
    client = Client(engine, response_store_size=0)
    response = await client.post("/v1/conversations", {})

    assert response.status_code == 400
    assert "response_store_size" in response.text
