"""Servers without a key and the web pages that a browser beside them has loaded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from sylvan.config.values import Secret
from sylvan.runtime.server.browsers import is_cross_origin
from sylvan.utils.origins import host_of, is_loopback
from tests.support.http import Client

STEERING = {"/abort_request": {"abort_all": True}, "/flush_cache": {}, "/pause_generation": {}}
CLIENTS = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}}
CLIENTS |= {"/generate": {"text": "x"}, "/tokenize": {"prompt": "x"}}
OURS = ["127.0.0.1:30000", "localhost", "LOCALHOST:1", "localhost.", "[::1]:30000", "127.0.0.2"]
OURS += ["[::ffff:127.0.0.1]"]
FOREIGN_HOSTS = [
    "evil.com",
    "127.evil.com",
    "127.0.0.1.nip.io:30000",
    "localhost.evil.com",
    "10.0.0.1",
]
FOREIGN_HOSTS += ["[::2]", "0.0.0.0", "evil.localhost.com", "xn--localhost"]
MALFORMED = [
    "[",
    "[::1",
    "::1",
    "evil.com@localhost",
    "localhost/evil.com",
    "local host",
    "localhost:x",
]
MALFORMED += ["localhost:99999", "localhost#", "[127.0.0.1]", "a" * 300, "local\xe4host", "."]
FOREIGN_ORIGINS = [
    "null",
    "http://evil.com",
    "http://127.evil.com",
    "http://[",
    "http://localhost@evil.com",
]
FOREIGN_ORIGINS += ["file://", "http://127.0.0.1:3000", "", "http://"]


@pytest.mark.parametrize("host", OURS)
async def test_names_of_loopback_are_ours(client, host):
    for path in ("/v1/files", "/server_info", "/live", "/"):
        assert (await client.get(path, headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_rebound_names_reach_nothing(client, host):
    for path, body in (STEERING | CLIENTS).items():
        assert (await client.post(path, body, headers={"host": host})).status_code == 403
    for path in ("/v1/files", "/server_info", "/cache/tree", "/metrics", "/nothing", "/"):
        answer = await client.get(path, headers={"host": host})
        assert answer.status_code == 403
        assert "server.allowed_hosts" in answer.text
    assert client.engine.control.requests == []
    assert client.engine.control.commands == []


@pytest.mark.parametrize("key", [None, Secret("k")])
@pytest.mark.parametrize("host", MALFORMED)
async def test_a_malformed_host_is_a_bad_request(engine, host, key):
    client = Client(engine, api_key=key)
    for path in ("/", "/nothing", "/v1/models"):
        answer = await client.get(path, headers={"host": host.encode("latin-1")})
        assert answer.status_code == 400


async def test_an_empty_host_is_a_bad_request(client):
    assert (await client.get("/v1/models", headers={"host": ""})).status_code == 400


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
async def test_pages_of_other_origins_reach_nothing(client, origin):
    headers = {"origin": origin, "content-type": "text/plain"}
    for path in STEERING | CLIENTS:
        answer = await client.http.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 403
    for path in ("/v1/files", "/server_info", "/cache/tree"):
        assert (await client.get(path, headers=headers)).status_code == 403
    assert client.engine.control.requests == []
    assert client.engine.control.commands == []


@pytest.mark.parametrize("site", ["cross-site", "same-site", "new"])
async def test_images_and_links_of_pages_reach_nothing(client, site):
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    for path in ("/v1/files", "/server_info", "/cache/tree", "/open_session?capacity_of_str_len=1"):
        assert (await client.get(path, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    "path", ["/flush_cache", "/freeze_gc", "/close_session?session_id=x", "/open_session"]
)
async def test_nothing_is_changed_by_get_without_a_key(engine, path):
    client = Client(engine)
    for method in ("GET", "HEAD"):
        assert (await client.http.request(method, path)).status_code in (403, 405)
    assert engine.control.commands == []
    keyed = Client(engine, api_key=Secret("k"))
    answer = await keyed.get(path, headers={"authorization": "Bearer k"})
    assert answer.status_code in (200, 400)


async def test_pages_of_the_server_itself_may_call(client):
    headers = {"origin": "http://127.0.0.1:30000", "sec-fetch-site": "same-origin"}
    assert (await client.post("/generate", {"text": "x"}, headers=headers)).status_code == 200
    assert (await client.post("/flush_cache", {}, headers=headers)).status_code == 200


async def test_origins_that_were_asked_for_may_call(engine):
    client = Client(engine, cors_origins=("https://chat.example",))
    headers = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}

    answer = await client.post("/generate", {"text": "x"}, headers=headers)

    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    other = await client.post("/generate", {"text": "x"}, headers={"origin": "http://evil.com"})
    assert other.status_code == 403


async def test_every_origin_may_generate_but_none_steers(engine):
    client = Client(engine, cors_origins=("*",))
    headers = {"origin": "http://evil.com"}

    assert (await client.post("/generate", {"text": "x"}, headers=headers)).status_code == 200
    assert (await client.post("/flush_cache", {}, headers=headers)).status_code == 403


@pytest.mark.parametrize("hosts", [("sylvan.example",), ("*",)])
async def test_names_that_were_asked_for_are_ours(engine, hosts):
    client = Client(engine, allowed_hosts=hosts)
    headers = {"host": "Sylvan.Example:30000"}
    assert (await client.get("/v1/models", headers=headers)).status_code == 200
    other = await client.get("/v1/models", headers={"host": "evil.com"})
    assert other.status_code == (200 if "*" in hosts else 403)


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"api_key": Secret("k")}])
async def test_names_of_other_servers_are_theirs(engine, settings):
    client = Client(engine, **settings)
    headers = {"host": "sylvan.example", "authorization": "Bearer k"}
    assert (await client.get("/v1/models", headers=headers)).status_code == 200


@given(st.text(max_size=40))
def test_any_host_is_parsed_or_malformed(text):
    found = host_of(text)
    assert found is None or found == found.lower()
    if found is not None and is_loopback(found):
        assert found in ("localhost", "::1") or found.startswith(("127.", "::ffff:"))


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_origin_is_foreign_unless_it_is_the_host(origin):
    headers = Headers({"origin": origin, "host": "127.0.0.1:30000"})
    if not is_cross_origin(headers, ()):
        assert origin.lower() in ("http://127.0.0.1:30000", "https://127.0.0.1:30000")
