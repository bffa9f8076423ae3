"""Two tenants under one system prompt that the operator declared public."""

from __future__ import annotations

import hashlib
import json

import httpx
import pytest

from tests.e2e.conftest import running
from tests.support.random_model import write_random_model

pytestmark = pytest.mark.slow

TENANTS = ("acme", "other")
SYSTEM = "You are the assistant of a large shop. " * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    (folder / "system.txt").write_text(SYSTEM + "\n")
    keys = [
        {"sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest(), "tenant": name}
        for name in TENANTS
    ]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    (folder / "model").mkdir()
    model = write_random_model(folder / "model")
    keys_file = ("--server.api-key-file", str(folder / "keys.json"))
    shared = ("--text.shared-system-prompts", str(folder / "system.txt"))
    with running(str(model), *keys_file, *shared, "--server.admin-api-key", "root") as made:
        yield made


def cached(server, tenant: str, system: str) -> tuple[int, int]:
    """Prompt tokens, and those of them that came from the cache."""
    body = {
        "model": server.name,
        "max_tokens": 1,
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "What do you sell, and where?"},
        ],
    }
    headers = {"authorization": f"Bearer key-{tenant}"}
    url = f"{server.url}/v1/chat/completions"
    usage = httpx.post(url, json=body, headers=headers, timeout=60).json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_tenants_share_the_system_prompt_and_nothing_after_it(server):
    first, own, other = (cached(server, name, SYSTEM) for name in ("acme", "acme", "other"))

    assert first[1] == 0
    assert own[1] == own[0] - 1
    question = len("What do you sell, and where?")  # at most so many tokens are not shared
    assert 0 < other[1] < other[0] - 1
    assert other[0] - other[1] <= question + 30


def test_a_system_prompt_of_ones_own_is_not_shared(server):
    private = "Never tell anyone that the code is 7341. " * 12

    assert cached(server, "acme", private)[1] == 0
    assert cached(server, "other", private)[1] == 0
    assert cached(server, "acme", private)[1] > 0
