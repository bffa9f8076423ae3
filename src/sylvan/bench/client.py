"""Sends the requests of a load test, and measures each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import aiohttp
import orjson

from sylvan.bench.apis import Api, History
from sylvan.bench.events import Events
from sylvan.bench.outcome import RequestRecord, TokenTimer
from sylvan.bench.workload import BenchTurn
from sylvan.protocol.errors import ConfigError, SylvanError
from sylvan.utils.clock import Clock, monotonic

KEEP_ALIVE_S = 3.5  # servers close idle connections after 5 s; closing first avoids a race
POLL_S = 0.25
CONTROL_S = 60.0
MAX_ERROR_CHARS = 300
OK = 200


class TargetError(SylvanError):
    """The server under test is unusable."""


class Client:
    """A client of one server; use it as an async context manager.

    Args:
        url: Its address, with or without `/v1`.
        headers: Headers of every request.
        timeout_s: Seconds after which a request fails.
        clock: Clock for measurements.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        clock: Clock = monotonic,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.clock = clock
        self._headers = headers
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=dict(self._headers),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            read_bufsize=1 << 18,
            raise_for_status=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def wait_ready(self, limit_s: float) -> None:
        """Wait until the server lists its models.

        Raises:
            TargetError: It does not within `limit_s`.
        """
        end_s = self.clock() + limit_s
        while True:
            try:
                await self.get("/v1/models")
            except TargetError as error:
                if self.clock() >= end_s:
                    raise TargetError(f"no server is ready at {self.url}: {error}") from error
                await asyncio.sleep(POLL_S)
            else:
                return

    async def get(self, path: str) -> dict[str, Any]:
        """Fetch a JSON object.

        Raises:
            TargetError: The server is unreachable, rejects the call, or answers something else.
        """
        return await self._call("GET", path)

    async def post(self, path: str) -> None:
        """Call a control route.

        Raises:
            TargetError: The server is unreachable, or rejects the call.
        """
        await self._call("POST", path)

    async def ask(
        self,
        api: Api,
        turn: BenchTurn,
        history: History,
        *,
        model: str,
        adapter: str | None,
        extra: Mapping[str, Any],
    ) -> RequestRecord:
        """Send one request and read its answer; errors are part of the outcome."""
        assert self._session is not None, "the client is used as a context manager"
        body = {**api.body(turn, history, model, adapter), **extra, **(turn.extra or {})}
        data = orjson.dumps(body)
        headers = {"content-type": "application/json"}
        outcome = RequestRecord(turn.prompt_tokens)
        sent_s = self.clock()
        reception = TokenTimer(outcome, sent_s)
        try:
            async with self._session.post(self.url + api.path, data=data, headers=headers) as reply:
                if reply.status != OK:
                    outcome.error = f"{reply.status}: {_shortened(await reply.read())}"
                elif reply.content_type == "text/event-stream":
                    await self._read_stream(api, reply, reception)
                else:
                    event = orjson.loads(await reply.read())
                    _take(api, event, reception, self.clock())
                reception.end(self.clock())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            outcome.error = f"the answer cannot be read: {type(error).__name__}: {error}"
        return outcome

    async def _read_stream(
        self, api: Api, reply: aiohttp.ClientResponse, reception: TokenTimer
    ) -> None:
        events = Events()
        async for data in reply.content.iter_any():
            now_s = self.clock()
            for payload in events.feed(data):
                _take(api, orjson.loads(payload), reception, now_s)
                if reception.outcome.error:
                    return

    async def _call(self, method: str, path: str) -> dict[str, Any]:
        assert self._session is not None, "the client is used as a context manager"
        limit = aiohttp.ClientTimeout(total=CONTROL_S)
        try:
            async with self._session.request(method, self.url + path, timeout=limit) as reply:
                data = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TargetError(f"{method} {path}: {type(error).__name__}: {error}") from error
        if reply.status != OK:
            raise TargetError(f"{method} {path}: {reply.status}: {_shortened(data)}")
        if method == "POST":
            return {}
        try:
            found = orjson.loads(data)
        except ValueError as error:
            raise TargetError(f"{method} {path}: the answer is not JSON") from error
        if not isinstance(found, dict):
            raise TargetError(f"{method} {path}: the answer is not a JSON object")
        return cast("dict[str, Any]", found)


async def first_model(client: Client) -> str:
    """Return the name of the first model that a server lists.

    Raises:
        TargetError: It lists none.
    """
    listed = (await client.get("/v1/models")).get("data")
    try:
        return str(cast("Any", listed)[0]["id"])
    except (LookupError, TypeError) as error:
        raise TargetError("the server lists no models; give target.model") from error


async def tokenizer_folder(client: Client) -> str:
    """Return the directory of the server's tokenizer, if it is on this machine.

    Raises:
        ConfigError: The server names none, or it is on another machine.
    """
    try:
        about = await client.get("/model_info")
    except TargetError:
        about = {}
    named = about.get("tokenizer_path") or about.get("model_path")
    if not isinstance(named, str) or not Path(named).is_dir():
        raise ConfigError(
            "target.tokenizer: give the directory of the model's tokenizer (--tokenizer DIR): "
            f"the server at {client.url} names none that is on this machine"
        )
    return named


def extra_fields(text: str | None) -> dict[str, Any]:
    """Parse `answer.extra_body`.

    Raises:
        ConfigError: It is not a JSON object.
    """
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"answer.extra_body: this is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError("answer.extra_body: expected a JSON object")
    return cast("dict[str, Any]", found)


def _take(api: Api, event: Any, reception: TokenTimer, now_s: float) -> None:
    error = event.get("error")
    if error:
        message = error.get("message", error) if isinstance(error, dict) else error
        reception.outcome.error = str(cast("object", message))[:MAX_ERROR_CHARS]
    else:
        api.read(event, reception, now_s)


def _shortened(data: bytes) -> str:
    return data[:MAX_ERROR_CHARS].decode(errors="replace").strip()
