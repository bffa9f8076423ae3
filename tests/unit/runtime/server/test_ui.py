"""`/ui`: the files of the web page, and how they are sent."""

from __future__ import annotations

import re

import pytest

from sylvan.config.values import Secret
from sylvan.ui.files import page_file
from tests.support.http import Client


async def test_the_page_is_open_where_calls_need_a_key(engine):
    client = Client(engine, api_key=Secret("k"))
    page = await client.get("/ui")
    script = await client.get("/ui/app.js")
    refused = await client.get("/v1/models")

    assert (page.status_code, script.status_code, refused.status_code) == (200, 200, 401)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_the_policy_lets_nothing_in_from_elsewhere(client):
    page = await client.get("/ui")
    policy = dict(
        part.split(" ", 1) for part in page.headers["content-security-policy"].split("; ")
    )

    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script[^>]*>[^<]|<style| on\w+=| style=", page.text)


async def test_links_of_the_page_lead_to_its_files(client):
    page = await client.get("/ui")
    links = re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text)

    assert len(links) == 3
    for link in links:
        assert (await client.get(f"/{link}")).status_code == 200


@pytest.mark.parametrize("path", ["/ui/", "/ui/index.html"])
async def test_other_addresses_of_the_page_lead_to_it(client, path):
    answer = await client.get(path)

    assert (answer.status_code, answer.headers["location"]) == (308, "../ui")


@pytest.mark.parametrize(
    "name", ["nothing.js", "files.py", "sources.sha256", "..%2ffiles.py", "%00.js", "a" * 3000]
)
async def test_there_are_no_other_files(client, name):
    assert (await client.get(f"/ui/{name}")).status_code == 404


async def test_a_browser_that_has_a_file_is_not_sent_it_again(client):
    first = await client.get("/ui/app.js")
    again = await client.get("/ui/app.js", headers={"if-none-match": first.headers["etag"]})
    other = await client.get("/ui/app.js", headers={"if-none-match": '"old"'})

    assert (again.status_code, again.content) == (304, b"")
    assert (other.status_code, other.content) == (200, first.content)


async def test_the_page_knows_who_sends_it():
    server, gateway = page_file("index.html", "server"), page_file("index.html", "gateway")

    assert server is not None
    assert gateway is not None
    assert b'data-site="server"' in server.body
    assert b'data-site="gateway"' in gateway.body
    assert server.headers["etag"] != gateway.headers["etag"]


async def test_a_page_of_another_name_is_refused(client):
    answer = await client.get("/ui", headers={"host": "evil.example"})

    assert answer.status_code == 403
