"""The HTTP application over a scripted engine, called without a network."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sylvan.runtime.server.app import app_of
from sylvan.runtime.server.context import make_context
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.clock import Clock, monotonic
from tests.support.scripted import ScriptedEngine, make_engine, write_checkpoint
from tests.support.settings import settings_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[ScriptedEngine]:
    made = make_engine(checkpoint, _tokenizer(checkpoint))
    yield made
    made.manager.close()


@functools.cache
def _tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


class Client:
    """Calls the application."""

    def __init__(self, engine: ScriptedEngine, clock: Clock = monotonic, **settings: Any) -> None:
        self.engine = engine
        settings.setdefault("served_model_name", "scripted")
        self.context = make_context(engine.manager, settings_of(**settings), clock)
        self.app = app_of(self.context)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000")

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **kwargs)

    async def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return await self.http.get(path, **kwargs)

    async def events(self, path: str, body: Any) -> list[Any]:
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)


def two_tenants(engine: ScriptedEngine, tmp_path: Path, **settings: Any) -> Client:
    """Return a client of a server that knows the keys of the tenants `red` and `blue`."""
    entries = [
        {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name}
        for name in ("red", "blue")
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    return Client(engine, api_key_file=str(tmp_path / "keys.json"), **settings)


def parse_events(text: str) -> list[Any]:
    """Decode the data of each event; the final [DONE] is a string."""
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        data = block.split("data: ", 1)[1]
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[Client]:
    made = Client(engine)
    yield made
    await made.http.aclose()
