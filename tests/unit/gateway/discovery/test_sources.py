"""Sources of workers: valid and malformed input."""

from __future__ import annotations

import os
import socket

import pytest

from sylvan.gateway.discovery.api import DiscoveryError
from sylvan.gateway.discovery.dns import DnsSource
from sylvan.gateway.discovery.file import FileSource
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.protocol.errors import ConfigError

TEMPLATE = WorkerSpec(url=" ", api_key="k")


async def test_a_file_lists_addresses_and_objects(tmp_path):
    file = tmp_path / "workers.yaml"
    file.write_text("- http://A:1/\n- {url: 'http://b:2', priority: 7, api_key: own}\n")
    source = FileSource(file, TEMPLATE)

    first, second = await source.list_workers()
    assert (first.url, first.api_key, first.priority) == ("http://a:1", "k", 50)
    assert (second.url, second.api_key, second.priority) == ("http://b:2", "own", 7)
    assert await source.list_workers() is None


async def test_json_and_an_object_around_the_list_will_do(tmp_path):
    file = tmp_path / "workers.json"
    file.write_text('{"workers": ["http://a:1"]}')
    assert [s.url for s in await FileSource(file, TEMPLATE).list_workers()] == ["http://a:1"]


async def test_a_file_that_is_replaced_is_read_again_even_within_one_tick(tmp_path):
    file, other = tmp_path / "workers.yaml", tmp_path / "new.yaml"
    file.write_text("[http://a:1]\n")
    source = FileSource(file, TEMPLATE)
    await source.list_workers()
    other.write_text("[http://b:1]\n")
    facts = file.stat()
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.replace(file)
    assert [s.url for s in await source.list_workers()] == ["http://b:1"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("workers: {a: 1}", "expected a list of workers"),
        ("", "expected a list of workers"),
        ("- [1]", "list of workers"),
        ("- ftp://a:1", r"workers\[0\]: url: expected http://"),
        ("- http://a:1\n- {url: 'http://b:1', cost: -1}", r"workers\[1\]: .*cost"),
        ("- {url: 'http://b:1', colour: red}", "colour"),
        ("- http://a:1\n- http://A:1/", "twice"),
        ("{", "workers.yaml"),
        ("!!python/object/apply:os.system [id]", "workers.yaml"),
    ],
)
async def test_garbage_is_named(tmp_path, text, why):
    file = tmp_path / "workers.yaml"
    file.write_text(text)
    with pytest.raises(DiscoveryError, match=why):
        await FileSource(file, TEMPLATE).list_workers()


async def test_what_was_malformed_is_read_again(tmp_path):
    file = tmp_path / "workers.yaml"
    source = FileSource(file, TEMPLATE)
    with pytest.raises(DiscoveryError, match="cannot be read"):
        await source.list_workers()
    file.write_text("{")
    for _ in range(2):
        with pytest.raises(DiscoveryError):
            await source.list_workers()
    file.write_text("[]")
    assert await source.list_workers() == []


async def test_each_address_of_a_name_is_a_worker(monkeypatch):
    source = DnsSource("servers.example:30000", TEMPLATE)
    answers = [["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"], ["10.0.0.1", "10.0.0.2", "fd00::1"]]

    def resolve(host, port, *args, **kwargs):
        assert (host, port) == ("servers.example", 30000)
        kind = socket.SOCK_STREAM
        return [(2, kind, 6, "", (address, port)) for address in answers.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [s.url for s in await source.list_workers()] == [
        "http://10.0.0.1:30000",
        "http://10.0.0.2:30000",
        "http://[fd00::1]:30000",
    ]
    assert await source.list_workers() is None


async def test_a_resolver_of_this_machine_will_do():
    found = await DnsSource("grpc://localhost:7", TEMPLATE).list_workers()
    assert "grpc://127.0.0.1:7" in [spec.url for spec in found]
    assert all(spec.api_key == "k" for spec in found)


async def test_a_name_that_does_not_resolve_is_no_answer(monkeypatch):
    def resolve(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(DiscoveryError, match=r"servers\.example does not resolve"):
        await DnsSource("servers.example:1", TEMPLATE).list_workers()


@pytest.mark.parametrize("target", ["name", "name:x", "https://name:1", ":1", "name:1/path", ""])
def test_targets_of_other_forms_are_refused(target):
    with pytest.raises(ConfigError, match=r"discovery\.dns"):
        DnsSource(target, TEMPLATE)
