"""Reports about the prefix cache to two tenants and the operator."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.conftest import running
from tests.support.random_model import write_random_model

pytestmark = pytest.mark.slow

SAME = "the quick brown fox jumps over the lazy dog "
OWN = {"acme": "where do we keep the blue paint", "other": "seven kettles stand on a shelf"}


@dataclass
class Caller:
    """Somebody with a key."""

    url: str
    key: str | None

    def get(self, path: str, **query: object) -> httpx.Response:
        return httpx.get(self.url + path, params=query, headers=self._headers(), timeout=60)

    def say(self, text: str, rid: str) -> None:
        body = {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": 1}}
        response = httpx.post(
            self.url + "/generate", json=body, headers=self._headers(), timeout=60
        )
        assert response.status_code == 200

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    keys = [{"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} for name in OWN]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    (folder / "model").mkdir()
    model = write_random_model(folder / "model")
    flags = ("--server.api-key-file", str(folder / "keys.json"), "--server.admin-api-key", "root")
    with running(str(model), *flags) as server:
        for name, own in OWN.items():
            caller = Caller(server.url, name)
            caller.say(SAME, f"{name}-same")
            caller.say(own, f"{name}-own")
            caller.say(own, f"{name}-again")
        yield server.url


@pytest.mark.parametrize("name", OWN)
def test_each_tenant_has_its_own_prompts_explained(url, name):
    caller = Caller(url, name)

    first = caller.get("/cache/explain", rid=f"{name}-own").json()
    again = caller.get("/cache/explain", rid=f"{name}-again").json()

    assert (first["reason"], first["cached_tokens"]) == ("never_seen", 0)
    assert again["reason"] == "all_cached"
    assert again["cached_tokens"] == again["prompt_tokens"] - 1


@pytest.mark.parametrize(("name", "other"), [("acme", "other"), ("other", "acme")])
def test_what_others_asked_reads_as_never_seen(url, name, other):
    caller = Caller(url, name)

    told = caller.get("/cache/explain", rid=f"{name}-same").json()
    assert (told["reason"], told["cached_tokens"]) == ("never_seen", 0)
    unknown = caller.get("/cache/explain", rid="nobody")
    theirs = caller.get("/cache/explain", rid=f"{other}-own")
    assert (theirs.status_code, theirs.json()) == (404, unknown.json())
    assert unknown.status_code == 404


@pytest.mark.parametrize(("name", "other"), [("acme", "other"), ("other", "acme")])
def test_the_tree_of_a_tenant_is_its_own(url, name, other):
    tree = Caller(url, name).get("/cache/tree").json()
    texts = [node["text"] for node in tree["nodes"]]

    assert any(text and OWN[name].startswith(text.rstrip()) for text in texts)
    assert not any(text[:6] in OWN[other] for text in texts)
    assert len({node["namespace"] for node in tree["nodes"]}) == 1
    assert "num_nodes" not in tree  # counts over all tenants


def test_the_operator_sees_all(url):
    operator = Caller(url, "root")

    told = operator.get("/cache/explain", rid="other-same").json()
    assert told["reason"] == "other_namespace"  # acme asked it before
    tree = operator.get("/cache/tree").json()
    assert tree["namespaces"] == len(OWN)
    of_tenants = [Caller(url, name).get("/cache/tree").json()["nodes"] for name in OWN]
    assert len(tree["nodes"]) == sum(map(len, of_tenants))
    assert operator.get("/cache/curve").status_code == 200


@pytest.mark.parametrize("path", ["/server_info", "/cache/curve", "/flush_cache"])
def test_nothing_else_of_the_operator_opens_to_a_tenant(url, path):
    assert Caller(url, "acme").get(path).status_code == 403


@pytest.mark.parametrize("path", ["/cache/tree", "/cache/explain?rid=acme-own"])
def test_strangers_see_nothing(url, path):
    assert Caller(url, None).get(path).status_code == 401
    assert Caller(url, "wrong").get(path).status_code == 403
