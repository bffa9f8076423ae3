"""HTTP requests to workers, with all failures mapped to one error."""

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
KEEP_ALIVE_S = 3.5  # servers close idle connections after five seconds; closing first avoids a race
READ_BYTES = 1 << 18
WHOLE_BYTES = 1 << 19
_SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A request to a worker.

    Attributes:
        method: HTTP method.
        url: Scheme, host and port.
        target: Path and query.
        headers: End-to-end headers.
        body: Encoded body.
    """

    method: str
    url: str
    target: str
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """A complete answer."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """The value of a header; "" if there is none."""
        return next((value for key, value in self.headers if key == name), "")


class Incoming:
    """An answer whose body is still arriving."""

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
        """Yield the body as it arrives. A slow reader slows the worker down instead of using RAM.

        Args:
            stall_s: Longest time without a byte, in seconds.

        Raises:
            UpstreamError: The connection broke before the end, or the worker stalled.
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
        """Read the whole body.

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
    """A connection pool to workers; belongs to one event loop.

    Use it as an async context manager.

    Raises:
        ConfigError: A certificate is unusable.
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
        assert self._session is not None, "__aenter__ ran before __aexit__"
        await self._session.close()

    @asynccontextmanager
    async def send(
        self, request: Outgoing, first_byte_s: float | None = None
    ) -> AsyncGenerator[Incoming]:
        """Send a request; the context yields the answer before its body is read.

        Leaving before the end of the body closes the connection, which aborts the request.

        Args:
            request: The request.
            first_byte_s: Longest time until the answer starts, in seconds.

        Raises:
            UpstreamError: The worker is unreachable, too slow, or does not speak HTTP.
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
        """The TLS context, built on first use because that takes 0.1 s."""
        if self._tls is None:
            self._tls = worker_tls(self._config)
        return self._tls

    async def call(
        self, request: Outgoing, timeout_s: float, max_bytes: int = 64 << 20
    ) -> WholeResponse:
        """Send a request, and read the whole answer.

        Raises:
            UpstreamError: As `send`; or it is larger than `max_bytes`.
        """
        with _explained(timeout_s):
            async with asyncio.timeout(timeout_s), self.send(request) as answer:
                return WholeResponse(answer.status, answer.headers, await answer.read(max_bytes))


def json_of(body: bytes) -> Mapping[str, object]:
    """Decode a JSON object.

    Raises:
        UpstreamError: It is not a JSON object.
    """
    try:
        return msgspec.convert(orjson.loads(body), dict[str, object])
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        message = "The worker's answer is not a JSON object."
        raise UpstreamError(message, kind="protocol") from error


def _within(seconds: float | None) -> AbstractAsyncContextManager[object]:
    """Return a timeout, or a null context: most requests have none, and this runs for each read."""
    return nullcontext() if seconds is None else asyncio.timeout(seconds)


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """Split large bodies into chunks, so that writing them does not block the event loop."""
    return io.BytesIO(body) if len(body) > WHOLE_BYTES else body or None


@contextmanager
def _explained(seconds: float | None) -> Generator[None]:
    """Map errors of the library to ours; `seconds` is the time waited."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        message = f"The worker cannot be reached: {error.os_error.strerror or error.os_error}."
        raise UpstreamError(message, kind="connect") from error
    except aiohttp.ServerTimeoutError as error:
        raise UpstreamError("The worker refuses connections.", kind="connect") from error
    except TimeoutError as error:
        message = f"The worker sent nothing for {seconds or 0:g} s."
        raise UpstreamError(message, kind="stall", status=504) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise UpstreamError("The worker closed the connection.", kind="closed") from error
    except (aiohttp.ClientError, ValueError) as error:
        message = f"The worker sent invalid HTTP: {str(error)[:200]}"
        raise UpstreamError(message, kind="protocol") from error
