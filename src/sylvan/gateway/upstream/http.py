"""Requests to workers over HTTP, and what goes wrong with them as one error."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass

import aiohttp
import msgspec
import orjson
from yarl import URL

from sylvan.config.route import WorkersConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.upstream.tls import worker_tls

CONNECT_S = 5.0
KEEP_ALIVE_S = 3.5  # servers keep idle connections for five seconds; who closes first is in no race
READ_BYTES = 1 << 18
WHOLE_BYTES = 1 << 19
_SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A request to a worker.

    Attributes:
        method: Of HTTP.
        url: Scheme, host and port.
        target: Path and query.
        headers: End to end.
        body: As it is sent.
    """

    method: str
    url: str
    target: str
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """A whole answer."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """The value of a header; "" if there is none."""
        return next((value for key, value in self.headers if key == name), "")


class Incoming:
    """An answer as it comes."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in response.raw_headers
        ]

    def header(self, name: str) -> str:
        """The value of a header; "" if there is none."""
        return self._response.headers.get(name, "")

    async def chunks(self, stall_s: float | None = None) -> AsyncGenerator[bytes, None]:
        """The body as it arrives. A reader that waits holds up the worker, not memory.

        Args:
            stall_s: Longest time without a byte.

        Raises:
            UpstreamError: The connection broke before the end, or nothing came for too long.
        """
        content = self._response.content
        while True:
            with _explained(stall_s):
                async with _within(stall_s):
                    chunk = await content.readany()
            if not chunk:
                return
            yield chunk

    async def read(self, max_bytes: int, stall_s: float | None = None) -> bytes:
        """The whole body.

        Raises:
            UpstreamError: As `chunks`; or it is larger than `max_bytes`.
        """
        data = bytearray()
        async for chunk in self.chunks(stall_s):
            data += chunk
            if len(data) > max_bytes:
                raise UpstreamError("The worker's answer is too large.", kind="protocol")
        return bytes(data)


class HttpUpstream:
    """Keeps connections to workers; belongs to one event loop.

    Use it as an async context.

    Raises:
        ConfigError: A certificate cannot be used.
    """

    def __init__(self, config: WorkersConfig) -> None:
        self._config = config
        self._tls: ssl.SSLContext | None = None
        if config.client_certfile or config.client_keyfile or config.ca_certfiles:
            self._tls = worker_tls(config)
        self._max_connections = config.max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpUpstream:
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=self._max_connections,
            keepalive_timeout=KEEP_ALIVE_S,
            ttl_dns_cache=10,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_SKIPPED,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BYTES,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None, "entered before it is left"
        await self._session.close()

    @asynccontextmanager
    async def send(
        self, request: Outgoing, first_byte_s: float | None = None
    ) -> AsyncGenerator[Incoming]:
        """Send a request; the answer's body is read from what comes.

        Leaving before its end closes the connection, by which the worker knows.

        Args:
            request: What to send.
            first_byte_s: Longest time until the answer begins.

        Raises:
            UpstreamError: The worker cannot be reached, does not answer in time, or not in HTTP.
        """
        assert self._session is not None, "the upstream was not entered"
        url = URL(request.url + request.target, encoded=True)
        with _explained(first_byte_s):
            async with _within(first_byte_s):
                response = await self._session.request(
                    request.method,
                    url,
                    headers=request.headers,
                    data=_payload(request.body),
                    allow_redirects=False,
                    ssl=self._context() if url.scheme == "https" else True,
                )
        try:
            yield Incoming(response)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    def _context(self) -> ssl.SSLContext:
        """Made when the first worker needs it, which takes a tenth of a second."""
        if self._tls is None:
            self._tls = worker_tls(self._config)
        return self._tls

    async def call(
        self, request: Outgoing, timeout_s: float, max_bytes: int = 64 << 20
    ) -> WholeResponse:
        """A short answer as a whole.

        Raises:
            UpstreamError: As `send`; or it is larger than `max_bytes`.
        """
        with _explained(timeout_s):
            async with asyncio.timeout(timeout_s), self.send(request) as answer:
                return WholeResponse(answer.status, answer.headers, await answer.read(max_bytes))


def json_of(body: bytes) -> Mapping[str, object]:
    """A JSON object.

    Raises:
        UpstreamError: It is something else.
    """
    try:
        return msgspec.convert(orjson.loads(body), dict[str, object])
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        message = "The worker answered something that is no JSON object."
        raise UpstreamError(message, kind="protocol") from error


def _within(seconds: float | None) -> AbstractAsyncContextManager[object]:
    """A timeout, or nothing at all: most requests have none here, and it is entered for each."""
    return nullcontext() if seconds is None else asyncio.timeout(seconds)


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """Large bodies are written piece by piece, so that they do not hold up everybody else."""
    return io.BytesIO(body) if len(body) > WHOLE_BYTES else body or None


@contextmanager
def _explained(seconds: float | None) -> Generator[None]:
    """Turns errors of the library into ours; `seconds` is how long was waited."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        message = f"The worker cannot be reached: {error.os_error.strerror or error.os_error}."
        raise UpstreamError(message, kind="connect") from error
    except aiohttp.ServerTimeoutError as error:
        raise UpstreamError("The worker accepts no connection.", kind="connect") from error
    except TimeoutError as error:
        message = f"The worker showed no sign of life for {seconds or 0:g} s."
        raise UpstreamError(message, kind="stall", status=504) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise UpstreamError("The worker closed the connection.", kind="closed") from error
    except (aiohttp.ClientError, ValueError) as error:
        message = f"The worker did not keep to HTTP: {str(error)[:200]}"
        raise UpstreamError(message, kind="protocol") from error
