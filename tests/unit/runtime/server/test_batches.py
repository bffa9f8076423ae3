"""`/v1/files` and `/v1/batches` over a scripted engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace

import pytest

from sylvan.runtime.server.internal import InternalCaller
from sylvan.runtime.server.openai import completions
from sylvan.runtime.server.routes import ENDPOINTS
from sylvan.runtime.server.security import Gate
from sylvan.utils.clock import VirtualClock
from tests.support.http import Client, two_tenants

PATH = "/v1/completions"


def line(name, **body):
    request = {"custom_id": name, "method": "POST", "url": PATH, "body": body}
    return json.dumps(request).encode()


async def upload(client, content, name="in.jsonl"):
    files = {"file": (name, content)}
    response = await client.http.post("/v1/files", files=files, data={"purpose": "batch"})
    assert response.status_code == 200, response.text
    return response.json()


async def start(client, content):
    file = await upload(client, content)
    body = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    response = await client.post("/v1/batches", body)
    assert response.status_code == 200, response.text
    return response.json()


async def ended(client, name):
    while True:
        batch = (await client.get(f"/v1/batches/{name}")).json()
        if batch["status"] in ("completed", "failed", "cancelled", "expired"):
            return batch
        await asyncio.sleep(0.005)


async def lines_of(client, name):
    content = (await client.get(f"/v1/files/{name}/content")).text
    return {entry["custom_id"]: entry for entry in map(json.loads, content.splitlines())}


@pytest.fixture
async def durable(engine, tmp_path):
    client = Client(engine, data_dir=str(tmp_path / "data"))
    yield client
    await client.context.batches.worker.stop()
    client.context.batches.store.close()


async def test_files_can_be_stored_read_listed_and_deleted(durable):
    content = b'binary \x00\xff\r\n--not-a-boundary\r\n"'
    file = await upload(durable, content, "a b.jsonl")

    assert (file["bytes"], file["filename"]) == (len(content), "a b.jsonl")
    assert (await durable.get(f"/v1/files/{file['id']}/content")).content == content
    assert (await durable.get(f"/v1/files/{file['id']}")).json() == file
    other = await upload(durable, b"x")
    listed = (await durable.get("/v1/files?limit=1")).json()
    assert listed["has_more"] is True
    rest = (await durable.get(f"/v1/files?after={listed['last_id']}")).json()["data"]
    assert {listed["data"][0]["id"], rest[0]["id"]} == {file["id"], other["id"]}
    assert (await durable.http.delete(f"/v1/files/{file['id']}")).json()["deleted"] is True
    assert (await durable.get(f"/v1/files/{file['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "multipart/form-data; boundary=x"),
        (b"--x\r\n", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nbody\r\n--x--\r\n", "multipart/form-data; boundary=x"),
        (b"{}", "application/json"),
        (b"--x--\r\n", "multipart/form-data; boundary=x"),
    ],
)
async def test_broken_forms_are_refused(durable, content, kind):
    response = await durable.http.post("/v1/files", content=content, headers={"content-type": kind})
    assert response.status_code == 400


async def test_batch_answers_every_line_at_the_lowest_priority(durable):
    content = b"\n".join([line(f"r{i}", prompt=f"p{i}") for i in range(20)])
    batch = await start(durable, content + b"\n" + line("bad", prompt=""))
    done = await ended(durable, batch["id"])

    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    good = await lines_of(durable, done["output_file_id"])
    texts = {name: e["response"]["body"]["choices"][0]["text"] for name, e in good.items()}
    assert texts == {f"r{i}": f"p{i}" for i in range(20)}
    bad = await lines_of(durable, done["error_file_id"])
    assert bad["bad"]["response"]["status_code"] == 400
    assert {r.priority for r in durable.engine.control.requests} == {-(2**31)}


async def test_a_fault_of_our_own_fails_its_line_only(durable):
    async def broken(call):
        if call.body.prompt == "p7":
            raise ZeroDivisionError
        return await completions.completions(call)

    table = [replace(e, handler=broken) if e.path == PATH else e for e in ENDPOINTS]
    gate = Gate(durable.context.current, durable.context.keyring)
    durable.context.batches.worker.begin(InternalCaller(durable.context, gate, table))
    batch = await start(durable, b"\n".join(line(f"r{i}", prompt=f"p{i}") for i in range(50)))
    done = await ended(durable, batch["id"])

    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 50, "completed": 49, "failed": 1}
    good = await lines_of(durable, done["output_file_id"])
    bad = await lines_of(durable, done["error_file_id"])
    assert set(good) == {f"r{i}" for i in range(50)} - {"r7"}
    assert bad["r7"]["response"]["status_code"] == 500
    assert bad["r7"]["response"]["body"]["message"] == "Internal error; see the server's log."


async def test_batches_keep_to_the_budget_of_their_tenant(engine, tmp_path):
    clock = VirtualClock()
    entry = {"sha256": hashlib.sha256(b"red").hexdigest(), "tenant": "red"}
    (tmp_path / "keys.json").write_text(
        json.dumps({"keys": [{**entry, "requests_per_minute": 12}]})
    )
    client = Client(engine, clock, api_key_file=str(tmp_path / "keys.json"))
    client.http.headers["authorization"] = "Bearer red"
    client.context.batches.worker._retry_s = 0.005
    batch = await start(client, b"\n".join(line(f"r{i}", prompt="p") for i in range(30)))

    async def served(count):
        while len(engine.control.requests) < count:
            await asyncio.sleep(0.001)
        for _ in range(20):  # several attempts later there are no more
            await asyncio.sleep(0.005)
        return len(engine.control.requests)

    assert await served(10) == 10  # the upload and the batch itself count, too
    clock.advance(60)
    assert await served(22) == 22
    clock.advance(60)
    assert await served(30) == 30
    store = client.context.batches.store
    while store.unfinished():
        await asyncio.sleep(0.001)
    assert store.batch(batch["id"], "red")["status"] == "completed"
    assert len(engine.control.requests) == 30
    await client.context.batches.worker.stop()


async def test_a_full_disk_is_named(durable):
    [pages] = durable.context.batches.store._database._db.execute("PRAGMA page_count").fetchone()
    durable.context.batches.store._database._db.execute(f"PRAGMA max_page_count = {pages}")
    files = {"file": ("in.jsonl", b"x" * 100_000)}
    response = await durable.http.post("/v1/files", files=files, data={"purpose": "batch"})

    assert response.status_code == 507
    assert "disk is full" in response.json()["message"]


async def test_batch_with_bad_lines_fails_naming_them(durable):
    bad = [
        b"{",
        b"[]",
        line("a", prompt="x"),
        line("a", prompt="x"),
        json.dumps({"custom_id": "b", "url": "/generate", "body": {}}).encode(),
        line("c", prompt="x", stream=True),
    ]
    batch = await start(durable, b"\n".join(bad))

    assert batch["status"] == "failed"
    assert [e["line"] for e in batch["errors"]["data"]] == [1, 2, 4, 5, 6]


async def test_batch_continues_after_a_restart(engine, tmp_path):
    folder = str(tmp_path / "data")
    first = Client(engine, data_dir=folder)
    engine.control.hold = True
    batch = await start(first, b"\n".join(line(f"r{i}", prompt="p") for i in range(3)))
    while not engine.control.requests:
        await asyncio.sleep(0)
    await first.context.batches.worker.stop()
    first.context.batches.store.close()

    engine.control.hold = False
    second = Client(engine, data_dir=folder)
    done = await ended(second, batch["id"])
    assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    await second.context.batches.worker.stop()
    second.context.batches.store.close()


async def test_batch_can_be_cancelled(durable):
    durable.engine.control.hold = True
    batch = await start(durable, line("r", prompt="p"))
    while not durable.engine.control.requests:
        await asyncio.sleep(0)
    cancelled = (await durable.http.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert cancelled["status"] == "cancelling"
    done = await ended(durable, batch["id"])

    assert done["status"] == "cancelled"
    assert done["cancelling_at"] is not None
    assert durable.engine.manager.num_live == 0


async def test_batch_that_has_ended_can_be_deleted(durable):
    durable.engine.control.hold = True
    batch = await start(durable, line("r", prompt="p"))
    path = f"/v1/batches/{batch['id']}"
    early = await durable.http.delete(path)
    assert (early.status_code, early.json()["param"]) == (409, "batch_id")
    await durable.http.post(f"{path}/cancel")
    await ended(durable, batch["id"])
    assert (await durable.http.delete(path)).json()["deleted"] is True

    assert (await durable.get(path)).status_code == 404
    assert (await durable.get("/v1/batches")).json()["data"] == []


async def test_a_tenant_stores_no_more_than_its_share(engine, tmp_path):
    client = two_tenants(engine, tmp_path, stored_bytes=5000)
    red, blue = ({"authorization": f"Bearer {name}"} for name in ("red", "blue"))
    client.http.headers.update(red)
    engine.control.hold = True
    file = await upload(client, line("r", prompt="p" * 2000))
    body = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    assert (await client.post("/v1/batches", body)).status_code == 200
    refused = await client.post("/v1/batches", body)
    assert refused.status_code == 413
    assert refused.json()["param"] == "input_file_id"
    assert "limits.stored_bytes=5000" in refused.json()["message"]
    files = {"file": ("in.jsonl", b"x" * 3000)}
    upload_refused = await client.http.post("/v1/files", files=files, data={"purpose": "batch"})
    assert (upload_refused.status_code, upload_refused.json()["param"]) == (413, "file")
    client.http.headers.update(blue)
    await upload(client, b"x" * 3000)

    client.http.headers.update(red)
    await client.http.delete(f"/v1/files/{file['id']}")
    await upload(client, b"x" * 1000)
    await client.context.batches.worker.stop()


async def test_what_is_old_is_forgotten(engine):
    client = Client(engine, retention_s=3600.0)
    now = 1e9
    object.__setattr__(client.context.service, "wall", lambda: now)
    old = await upload(client, b"x")
    now += 3000
    new = await upload(client, b"y")
    now += 601

    assert (await client.get(f"/v1/files/{old['id']}")).status_code == 404
    listed = (await client.get("/v1/files")).json()["data"]
    assert [file["id"] for file in listed] == [new["id"]]


async def test_batches_are_listed(durable):
    one = await start(durable, line("r", prompt="p"))
    await ended(durable, one["id"])
    listed = (await durable.get("/v1/batches?limit=5")).json()

    assert [b["id"] for b in listed["data"]] == [one["id"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"endpoint": "/generate"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
    ],
)
async def test_bad_batches_are_refused(durable, fields, param):
    file = await upload(durable, line("r", prompt="p"))
    body = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h", **fields}
    response = await durable.post("/v1/batches", body)

    assert (response.status_code, response.json()["param"]) == (400, param)


async def test_unknown_names_are_404(durable):
    for path in ("/v1/batches/x", "/v1/files/x", "/v1/files/x/content"):
        assert (await durable.get(path)).status_code == 404
