"""KV that outlives servers: restarts, kills, two servers on one store, and operation over HTTP."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import running
from tests.support.adapters import write_random_adapter
from tests.support.random_model import write_random_model
from tests.support.tiny import write_model

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
FLAGS = ("--load-format", "dummy", "--device", "cpu", "--threads", "1", "--page-size", "16")
TIERS = ("--enable-hierarchical-cache", "--tiers.prefetch-min-tokens", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


class Asker:
    """One server over HTTP."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def call(self, method: str, path: str, **fields: Any) -> httpx.Response:
        return httpx.request(method, self._url + path, headers=self._headers, timeout=60, **fields)

    def ask(self, text: str = PROMPT, **fields: Any) -> tuple[list[int], int]:
        """Generated ids, and prompt tokens that came from the cache."""
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        body = {"text": text, "rid": "r", "sampling_params": sampling} | fields
        reply = self.call("POST", "/generate", json=body).json()
        return reply["output_ids"], reply["meta_info"]["cached_tokens"]

    def status(self) -> dict:
        return self.call("GET", "/hicache/storage-backend").json()

    def settle(self) -> dict:
        """Wait until all that was computed is in the store."""
        for _ in range(600):
            status = self.status()
            counts = status["counts"]
            if counts["offered_tokens"] and not status["pending_bytes"]:
                return status
            time.sleep(0.05)
        raise AssertionError(f"still writing: {status}")


@pytest.mark.slow
def test_a_server_that_was_killed_finds_its_kv_again(model, tmp_path):
    flags = (*FLAGS, *TIERS, "--tiers.storage", str(tmp_path / "kv"))
    with running(model, *flags) as server:
        asker = Asker(server.url)
        wanted, cached = asker.ask()
        assert cached == 0
        asker.settle()
        server.kill()

    with running(model, *flags) as server:
        asker = Asker(server.url)
        assert asker.ask() == (wanted, len(PROMPT) // 16 * 16)
        told = asker.call("GET", "/cache/explain", params={"rid": "r"}).json()
        assert told["tiers"] == {"device": 0, "host": 0, "storage": len(PROMPT) // 16 * 16}
        metrics = asker.call("GET", "/metrics").text
        assert 'sglang:prefetched_tokens_total{engine_type="unified"' in metrics

        with running(model, *flags) as second:
            assert Asker(second.url).ask()[0] == wanted, "two servers use one store"


@pytest.mark.slow
def test_tenants_find_their_own_again_and_nothing_of_others(model, tmp_path):
    key_file, keys = tmp_path / "key", tmp_path / "keys.json"
    key_file.write_text("0123456789abcdef" * 4)
    key_file.chmod(0o600)
    keys.write_text(tenant_keys())
    flags = (
        *(
            *FLAGS,
            *TIERS,
            "--tiers.storage",
            str(tmp_path / "kv"),
            "--server.api-key-file",
            str(keys),
        ),
        *("--tiers.key-file", str(key_file), "--server.admin-api-key", "root"),
    )
    with running(model, *flags) as server:
        wanted, _ = Asker(server.url, "key-a").ask()
        Asker(server.url, "root").settle()
    stored = b"".join(p.read_bytes() for p in Path(tmp_path, "kv", "pages").glob("*/*/*"))
    assert stored.count(b"SYKV") >= len(PROMPT) // 16

    with running(model, *flags) as server:
        assert Asker(server.url, "key-b").ask() == (wanted, 0)
        assert Asker(server.url, "key-a").ask() == (wanted, len(PROMPT) // 16 * 16)


def tenant_keys() -> str:
    each = [
        {"tenant": name, "sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest()}
        for name in "ab"
    ]
    return json.dumps({"keys": each})


@pytest.mark.slow
def test_a_store_is_operated_over_http(model, tmp_path):
    with running(model, *FLAGS, *TIERS, "--server.admin-api-key", "root") as server:
        asker = Asker(server.url, "root")
        put = {"hicache_storage_backend": str(tmp_path / "kv")}
        assert asker.status()["storage"] is None
        assert (
            Asker(server.url).call("PUT", "/hicache/storage-backend", json=put).status_code == 401
        )
        bad = [
            ({"hicache_storage_backend": "hf3fs"}, "not supported yet"),
            ({"hicache_storage_backend": "mooncake"}, "mooncake://MASTER:PORT"),
            ({**put, "hicache_write_policy": "never"}, "hicache_write_policy"),
            ({**put, "hicache_storage_backend_extra_config_json": '{"a": 1}'}, "'a'"),
            ({**put, "hicache_storage_backend_extra_config_json": '{"ttl_s": "x"}'}, "ttl_s"),
            ({"hicache_storage_backend": "redis://127.0.0.1:1/0"}, "Redis"),
        ]
        for body, why in bad:
            reply = asker.call("PUT", "/hicache/storage-backend", json=body)
            assert reply.status_code in (400, 422, 503), body
            assert why in reply.text
        assert asker.call("DELETE", "/hicache/storage-backend").status_code == 400

        assert asker.call("PUT", "/hicache/storage-backend", json=put).json()["success"]
        assert asker.call("PUT", "/hicache/storage-backend", json=put).status_code == 400
        wanted, _ = asker.ask()
        asker.settle()
        layout = asker.call("GET", "/get_hicache_l3_cache_layout").json()
        assert layout["page_size"] == 16
        assert layout["groups"][0]["kind"] == "full"
        assert [*Path(tmp_path, "kv", "pages").glob("*/*/*")]

        assert asker.call("POST", "/hicache/storage-backend/clear").status_code == 200
        assert not [*Path(tmp_path, "kv", "pages").glob("*/*/*")]
        assert asker.ask()[0] == wanted
        assert asker.call("DELETE", "/hicache/storage-backend").json()["success"]
        assert asker.status()["storage"] is None
        assert asker.ask()[0] == wanted


@pytest.mark.slow
def test_a_host_tier_without_a_store(model):
    flags = (
        *FLAGS,
        "--max-total-tokens",
        "1280",
        "--hicache-ratio",
        "3",
        "--context-length",
        "1000",
    )
    with running(model, *flags) as server:
        asker = Asker(server.url)
        wanted, _ = asker.ask()
        for number in range(3):
            asker.ask(f"{number} " + PROMPT[::-1])
        assert asker.ask()[0] == wanted
        told = asker.call("GET", "/cache/explain", params={"rid": "r"}).json()["tiers"]
        assert told["host"] > 0
        assert told["storage"] == 0
        status = asker.status()
        assert status["storage"] is None
        assert status["host"]["total_tokens"] >= 3 * 1280
        assert status["counts"]["host_loaded_tokens"] >= told["host"]
        metrics = asker.call("GET", "/metrics").text
        assert 'cache_source="host"' in metrics
        assert "sglang:hicache_host_loaded_tokens_total" in metrics
        tiers = asker.call("GET", "/cache/curve").json()["tiers"]
        assert [(tier["tier"], tier["tokens"]) for tier in tiers] == [
            ("device", 1280),
            ("host", status["host"]["total_tokens"]),
        ]
        assert tiers[0]["hit_rate"] < tiers[1]["hit_rate"]


def test_a_server_without_tiers_says_how_to_have_them(server):
    reply = Asker(server.url, "secret").call("GET", "/hicache/storage-backend")
    assert reply.status_code == 400
    assert "--enable-hierarchical-cache" in reply.text


@pytest.mark.slow
def test_kv_of_adapters_is_found_again_by_their_contents(tmp_path):
    model = write_random_model(tmp_path / "model", context_len=2048)
    adapters = {
        name: write_random_adapter(tmp_path / str(seed), model, seed)
        for seed, name in enumerate(("first", "second"))
    }
    flags = (*FLAGS[2:], *TIERS, "--tiers.storage", str(tmp_path / "kv"), "--lora-paths")
    paths = [f"{name}={folder}" for name, folder in adapters.items()]
    names = (None, *adapters)
    with running(str(model), *flags, *paths) as server:
        asker = Asker(server.url)
        wanted = {name: asker.ask(lora_path=name)[0] for name in names}
        asker.settle()
    assert wanted["first"] != wanted["second"]

    with running(str(model), *flags, *paths) as server:
        asker = Asker(server.url)
        again = {name: asker.ask(lora_path=name) for name in names}
        assert {name: ids for name, (ids, _) in again.items()} == wanted
        (whole,) = {cached for _, cached in again.values()}
        assert whole >= 64
    changed = [f"first={adapters['second']}", f"third={adapters['first']}"]
    with running(str(model), *flags, *changed) as server:
        asker = Asker(server.url)
        assert asker.ask(lora_path="first") == (wanted["second"], 0), "another adapter by that name"
        assert asker.ask(lora_path="third")[0] == wanted["first"]
        assert asker.ask()[0] == wanted[None]
